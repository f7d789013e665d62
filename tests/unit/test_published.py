"""Predictions beside published runs, and how fast products and attention are by their sizes."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from rotation import share

from fullshard.foresight.hardware import MATMUL_REFERENCE_SIZE, attention_fraction, matmul_fraction

PREDICTIONS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "predictions.py"))
ROWS = [*PREDICTIONS["ROWS"], *PREDICTIONS["FOUNDRY"]]


@pytest.mark.parametrize("row", share(ROWS), ids=lambda row: row.name)
def test_a_published_run_is_predicted_within_fifteen_percent(row: Any) -> None:
    r = PREDICTIONS["predicted"](row)
    assert r.tokens_per_second == pytest.approx(row.tokens, rel=0.15)
    if row.active is not None:
        assert r.peak / 2**30 == pytest.approx(row.active, rel=0.15)
    if row.reserved is not None:
        least, most = ((nbytes - r.gpu.context) / 2**30 for nbytes in r.needs)
        assert least <= 1.15 * row.reserved and most >= 0.85 * row.reserved
    assert r.fits, "it ran"


def test_the_table_has_long_sequences_and_all_sizes_and_says_what_is_fitted() -> None:
    assert len(ROWS) >= 30 and max(row.length for row in ROWS) == 65536
    assert sum(row.fitted for row in ROWS) <= 6


FA2 = {  # FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: Tflop/s of FlashAttention-2 for 512, 1k, 2k, 4k, 8k and 16k tokens
    (False, False, 64): (282, 306, 318, 321, 322, 324),
    (False, False, 128): (309, 350, 362, 368, 370, 370),
    (False, False, 256): (275, 313, 321, 323, 324, 326),
    (False, True, 64): (180, 229, 262, 284, 295, 299),
    (False, True, 128): (191, 260, 298, 319, 333, 335),
    (True, False, 64): (198, 238, 264, 279, 287, 291),
    (True, False, 128): (214, 260, 291, 310, 318, 322),
}


@pytest.mark.parametrize("kernel", FA2)
def test_attention_has_the_speeds_that_were_published_by_pass_mask_head_and_length(kernel: tuple[bool, bool, int]) -> None:
    backward, causal, head = kernel
    for length, published in zip((512, 1024, 2048, 4096, 8192, 16384), FA2[kernel]):
        assert 370 * attention_fraction(backward=backward, causal=causal, head=head, length=length) == pytest.approx(
            published, rel=0.07
        )


def test_products_are_slower_the_smaller_their_smallest_size_is() -> None:
    sizes = (16, 256, 1024, MATMUL_REFERENCE_SIZE, 16384)
    parts = [matmul_fraction(16384, size, 16384) for size in sizes]
    assert parts == sorted(parts) and parts[3] == 1 < parts[4] < 1.15 and parts[0] < 0.05
    assert matmul_fraction(8, 4096, 4096) == matmul_fraction(4096, 8, 4096) == matmul_fraction(4096, 4096, 8)
