"""Every python block of the documentation runs, in order, page by page."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness import World, ranks

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[tuple[int, str]]:
    """(line, code) of each python block."""
    text = (DOCS / page).read_text()
    return [(text[: m.start()].count("\n") + 1, m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)]


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The working directory, for the length of the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_page(world: World, page: str, *, ranks_per_node: int | None = None) -> None:
    """Run the python blocks of a page in order, in an empty folder that the ranks share, with what torchrun puts in the environment."""
    local = world.size if ranks_per_node is None else ranks_per_node
    torchrun = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.rank % local, "LOCAL_WORLD_SIZE": local}
    found = blocks(page)
    assert found
    names: dict[str, object] = {}
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(),
        inside(world.folder("page")),
        mock.patch.dict(os.environ, {name: str(value) for name, value in torchrun.items()}),
    ):
        warnings.filterwarnings("ignore", message="use_orig_params|enable_nested_tensor|unit .* mixes")
        for line, code in found:
            exec(compile("\n" * line + code, str(DOCS / page), "exec"), names)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "page",
    [
        "wrapping.md",
        "from-fsdp1.md",
        "from-fsdp2.md",
        "from-deepspeed.md",
        "compile.md",
        "explain.md",
        "levels.md",
        "muon.md",
        "weights.md",
    ],
)
@ranks(2, limit=240)
def test_the_snippets_of_a_page_run(world: World, page: str) -> None:
    run_page(world, page)


@pytest.mark.parametrize("page", ["tutorial.md", "more-than-one-machine.md"])
@ranks(4, limit=240)
def test_the_snippets_of_a_page_run_on_two_nodes_of_two_ranks(world: World, page: str) -> None:
    """Those of the tutorial compare the losses of its steps; nodes are what the environment says."""
    run_page(world, page, ranks_per_node=2)


def test_the_table_of_a_plan_is_the_one_that_is_printed() -> None:
    from fullshard import plan_model

    names: dict[str, object] = {}
    exec(blocks("wrapping.md")[0][1], names)
    printed = str(plan_model(names["model"]))  # type: ignore[arg-type]
    assert printed in (DOCS / "wrapping.md").read_text(), printed


def commands() -> list[str]:
    """The command lines of the page on explain, those of its table included."""
    text = (DOCS / "explain.md").read_text()
    return [
        line.replace("SMALL", "examples/llama.py:llama --with size=1b")
        for line in re.findall(r"python -m fullshard explain [^`\n]+", text)
    ]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("command", commands())
def test_the_command_lines_on_foresight_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fullshard.__main__ import main

    monkeypatch.chdir(DOCS.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["fullshard", *command.split()[3:]])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code in (0, 1)
    printed = capsys.readouterr().out
    text = (DOCS / "explain.md").read_text()
    if f"```text\n{command}\n```\n\n```text\n" in text:
        assert printed.rstrip() in text, f"the page shows another report of: {command}"


def test_every_argument_and_method_of_fsdp1_has_a_row() -> None:
    import inspect

    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    table = (DOCS / "from-fsdp1.md").read_text()
    arguments = [name for name in inspect.signature(FullyShardedDataParallel.__init__).parameters if name != "self"]
    for name in [*arguments, *(strategy.name for strategy in ShardingStrategy)]:
        assert name in table, name
    for name in vars(FullyShardedDataParallel):
        if not name.startswith("_") and callable(getattr(FullyShardedDataParallel, name)):
            short = name.replace("set_state_dict_type", "set_...").replace("get_state_dict_type", "get_...")
            short = (
                short.replace("_optim_state_dict", "_...") if short.split("_")[0] in ("shard", "scatter", "flatten") else short
            )
            assert short in table, name


def test_the_wrapper_has_fsdp1s_constructor_and_every_public_method() -> None:
    import inspect

    from torch.distributed.fsdp import FullyShardedDataParallel

    from fullshard.compat import FSDP

    theirs, ours = (inspect.signature(cls.__init__).parameters for cls in (FullyShardedDataParallel, FSDP))
    assert list(ours) == list(theirs)
    assert {name: p.default for name, p in ours.items()} == {name: p.default for name, p in theirs.items()}
    for name, value in vars(FullyShardedDataParallel).items():
        if not name.startswith("_"):
            assert name in vars(FSDP), name
            if inspect.isfunction(value) or isinstance(value, staticmethod):
                wanted = list(inspect.signature(getattr(FullyShardedDataParallel, name)).parameters)
                assert list(inspect.signature(getattr(FSDP, name)).parameters) == wanted, name
