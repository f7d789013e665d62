"""What a unit costs a program without frills: an exact count of the Python functions of fullshard's own that run per unit and step."""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from fullshard._torch import HONOURS_SUBCLASSES

SOURCE = str(Path(fullshard.__file__).parent)


class Block(nn.Module):
    """Eleven parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for index in range(7):
            self.register_parameter(f"scale{index}", nn.Parameter(torch.ones(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        for index in range(7):
            x = x * getattr(self, f"scale{index}")
        return x


def file_of(frame: FrameType | None) -> str | None:
    """The file of the package that a frame is in. Wrappers of torch's private parts count as one: a reader needs their names."""
    if frame is None or not frame.f_code.co_filename.startswith(SOURCE):
        return None
    name = Path(frame.f_code.co_filename).relative_to(SOURCE)
    return name.parts[0] if name.parts[0] == "_torch" else str(name)


def calls_of_a_step(units: int) -> Counter[tuple[str, str, str]]:
    """How often each function was called in a forward and backward of so many units: (file of the caller, file, function)."""
    model = nn.Sequential(*[Block() for _ in range(units)])
    for module in (*model, model):
        fullshard.fully_shard(module, mesh=init_device_mesh("cpu", (8,)))
    x, counts = torch.ones(2, 8), Counter[tuple[str, str, str]]()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        file, caller = file_of(frame), frame.f_back
        if event == "call" and file is not None:
            while caller is not None and file_of(caller) is None:
                caller = caller.f_back
            counts[file_of(caller) or "torch", file, f"{frame.f_code.co_name} {frame.f_code.co_firstlineno}"] += 1

    for _ in range(3):  # orders are known then
        model(x).sum().backward()
        model.zero_grad()
    sys.setprofile(count)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    return counts


def frames_of_all_gathers() -> int:
    """The most Python frames between a call of a module and the process group, which it asks for an all-gather."""
    found: list[int] = []

    def asked(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            callers = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]
            if nn.Module._call_impl.__code__ in callers:
                found.append(callers.index(nn.Module._call_impl.__code__))
            return inner(*args, **kwargs)

        return call

    names = [name for name in dir(dist.ProcessGroup) if "all_gather" in name or "allgather" in name]
    with mock.patch.multiple(dist.ProcessGroup, **{name: asked(getattr(dist.ProcessGroup, name)) for name in names}):
        calls_of_a_step(4)
    return max(found)


def test_a_unit_of_eleven_parameters_costs_so_many_calls() -> None:
    """Eight more units against eight, so that what a step costs besides cancels out. Collectives do nothing (torch's fake group)."""
    from exits import script  # which this file lacks where it is the program

    done = script(Path(__file__))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    calls, functions = (81, 58) if HONOURS_SUBCLASSES else (93, 61)  # torch 2.11 tells nothing, so groups look each time
    assert found["calls"] <= calls and found["functions"] <= functions and found["files"] <= 10, found
    assert 0 < found["frames"] <= 6, found


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    few, many = calls_of_a_step(8), calls_of_a_step(16)
    per_unit = {key: (many[key] - few[key]) / 8 for key in many if many[key] != few[key]}
    found = {
        "calls": sum(per_unit.values()),
        "functions": len({(file, function) for _, file, function in per_unit}),
        "files": len({file for _, file, _ in per_unit}),
        "frames": frames_of_all_gathers(),
        # Drawn by docs/pictures/draw.py.
        "arrows": sorted({(caller, file) for caller, file, _ in per_unit if caller != file}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
