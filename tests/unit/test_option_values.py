"""Values of options that mean nothing are refused where they are given, and the error names the option."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fullshard import CheckPolicy, CommPolicy, DataParallelMeshDims

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: CommPolicy(direct_min_bytes="4"), "CommPolicy.direct_min_bytes must be None or a number >= 0, got '4'."),
    (lambda: CommPolicy(direct_min_bytes=True), "CommPolicy.direct_min_bytes must be None or a number >= 0, got True."),
    (lambda: CommPolicy(prefetch_bytes=0.5), "CommPolicy.prefetch_bytes must be an int of at least 0, or None, got 0.5."),
    (lambda: CheckPolicy(patience="1"), "CheckPolicy.patience must be a number of seconds >= 0, got '1'."),
    (lambda: CheckPolicy(patience=None), "CheckPolicy.patience must be a number of seconds >= 0, got None."),
    (lambda: CheckPolicy(timeout="60"), "CheckPolicy.timeout must be None or a number of seconds > 0, got '60'."),
    (lambda: CheckPolicy(silence="root"), "CheckPolicy.silence takes a tuple of names, as in ('root',), got 'root'."),
    (lambda: CheckPolicy(silence=5), "CheckPolicy.silence takes a tuple of names, as in ('root',), got 5."),
    (
        lambda: DataParallelMeshDims(),
        "Expected at least one axis in shard= or replicate= of DataParallelMeshDims, got None for both.",
    ),
    (
        lambda: DataParallelMeshDims(()),
        "Expected at least one axis in shard= or replicate= of DataParallelMeshDims, got () and None.",
    ),
]


@pytest.mark.parametrize("make, text", WRONG, ids=[text.split(",")[-1].strip() for _, text in WRONG])
def test_a_value_that_means_nothing_is_refused_by_the_name_of_its_option(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ValueError) as raised:
        make()
    assert str(raised.value) == text


def test_numbers_of_any_kind_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    assert CheckPolicy(patience=numpy.float32(0.5), timeout=numpy.int64(3)).timeout == 3
    assert CommPolicy(direct_min_bytes=float("inf")).direct_min_bytes == float("inf")
