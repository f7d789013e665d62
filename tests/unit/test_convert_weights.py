"""Checkpoints made of others by one process, what is in them, and what is wrong with them; by the command line, too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from exits import command_line
from torch import Tensor

from fullshard.weights.boxes import TensorInfo
from fullshard.weights.command import problems
from fullshard.weights.converting import convert_weights
from fullshard.weights.headers import OpenFiles, header_bytes, read_checkpoint
from fullshard.weights.rules import Convert, Drop, Merge, Rename, Split, Stack, Transpose, Unstack
from fullshard.weights.transfer import Reader, Transfer


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {f"layers.{i}.{x}.weight": torch.randn(6, 4) for i in range(2) for x in "qkv"}
    found |= {f"experts.{i}.w": torch.randn(3, 5) for i in range(3)}
    return found | {
        "scale": torch.tensor(2.0),
        "none": torch.empty(0, 3),
        "ids": torch.arange(7),
        "half": torch.randn(5).half(),
    }


def write(file: Path, named: dict[str, Tensor]) -> None:
    data = b"".join(bytes(Transfer("", 0, tensor.contiguous()).memory) for tensor in named.values())
    file.write_bytes(header_bytes([TensorInfo(name, one.dtype, tuple(one.shape)) for name, one in named.items()]) + data)


def read(folder: Path) -> dict[str, Tensor]:
    found = {}
    files = OpenFiles()
    for header in read_checkpoint(folder, files):
        reader = Reader(files, threads=1)
        for tensor in header.tensors:
            found[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            reader.run([Transfer(header.file, tensor.offset, found[tensor.name])])
        reader.close()
    files.close()
    return found


def kept(but: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, one in named.items() if not name.startswith(but)}


def merged(named: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {f"layers.{i}.qkv": torch.cat([named[f"layers.{i}.{x}.weight"] for x in "qkv"]).T for i in range(2)}
    return kept("layers", named) | joined


MAPS: dict[str, tuple[Any, Any]] = {
    "none": (None, lambda named: named),
    "names": ({"scale": "gain"}, lambda named: {("gain" if name == "scale" else name): one for name, one in named.items()}),
    "merge": (
        [Merge([rf"(.*)[.]{x}[.]weight" for x in "qkv"], r"\1.qkv"), Transpose("qkv$")],
        merged,
    ),
    "columns": (
        [Merge([rf"layers[.]0[.]{x}[.]weight" for x in "qkv"], "w", dim=1), Split("w", ["a", "b"], dim=1, sizes=(5, 7))],
        lambda named: (
            kept("layers.0", named)
            | dict(zip("ab", torch.cat([named[f"layers.0.{x}.weight"] for x in "qkv"], 1).split((5, 7), 1)))
        ),
    ),
    "stack": (
        [Stack(r"experts[.](\d+)[.]w", "experts"), Transpose("experts", (1, 2))],
        lambda named: (
            kept("experts", named) | {"experts": torch.stack([named[f"experts.{i}.w"] for i in range(3)]).transpose(1, 2)}
        ),
    ),
    "there and back": (
        [Stack(r"experts[.](\d+)[.]w", "experts"), Unstack("experts", "experts.{}.w"), Rename("^", "m."), Rename("^m[.]", "")],
        lambda named: named,
    ),
    "convert": (
        [Convert(["scale", "half"], "product", lambda scale, half: scale * half.float()), Drop("layers")],
        lambda named: kept("half", kept("scale", kept("layers", named))) | {"product": named["scale"] * named["half"].float()},
    ),
}


@pytest.mark.parametrize("buffer_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("kind", MAPS)
def test_what_is_made_is_what_the_rules_say_whatever_the_buffer(kind: str, buffer_bytes: int, tmp_path: Path) -> None:
    key_map, expected = MAPS[kind]
    named = tensors()
    half = dict(list(named.items())[:6])
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "a.safetensors", half)
    write(tmp_path / "in" / "b.safetensors", {name: one for name, one in named.items() if name not in half})
    for dtype, most in ((None, 10**9), (torch.bfloat16, 50)):
        done = convert_weights(
            tmp_path / "in", tmp_path / "out", key_map=key_map, dtype=dtype, max_shard_bytes=most, buffer_bytes=buffer_bytes
        )
        wanted = {
            name: one.to(dtype) if dtype is not None and one.is_floating_point() else one
            for name, one in expected(named).items()
        }
        found = read(tmp_path / "out")
        assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert sorted(done.files) == sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
        assert (len(done.files) > 1) == (most == 50)
        assert done.bytes_written == sum(one.numel() * one.itemsize for one in wanted.values())
    assert not problems(tmp_path / "out")[0]


def test_a_checkpoint_can_take_the_place_of_its_source(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", tensors())
    (tmp_path / "config.json").write_text("{}")
    convert_weights(tmp_path, tmp_path, key_map=[Rename("^", "model.")])
    assert set(read(tmp_path)) == {f"model.{name}" for name in tensors()}
    with pytest.raises(ValueError, match="gives 'x' twice"):
        convert_weights(tmp_path, tmp_path, key_map=[Rename(".+", "x")])
    with pytest.raises(ValueError, match="expected the function for 'b' to return"):
        convert_weights(tmp_path, tmp_path, key_map=[Convert(["model.scale"], "b", _lies)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert set(read(tmp_path)) == {f"model.{name}" for name in tensors()}


def _lies(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.view(1)


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    named = tensors()
    bad = named | {
        "half": torch.tensor([float("nan"), float("inf"), 1]),
        "fp8": torch.tensor([float("nan"), 1]).to(torch.float8_e4m3fn),
    }
    write(tmp_path / "model.safetensors", bad)
    found, headers = problems(tmp_path)
    assert len(headers) == 1 and [line.split(": ", 1)[1] for line in found] == [
        "tensor 'half' has 1 NaN and 1 infinite of 3 values.",
        "tensor 'fp8' has 1 NaN of 2 values.",
    ]
    assert problems(tmp_path, values=False)[0] == []
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": named["scale"], "c": named["scale"]})
    write(tmp_path / "model-00002-of-00002.safetensors", {"b": named["scale"]})
    index = {
        "metadata": {"total_size": 5},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found, _ = problems(tmp_path)
    assert len(found) == 2 and "has 'c', which the index does not list" in found[0]
    assert found[1] == "The index lists a total of 5 bytes for all tensors, which have 12."
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(b"short")
    found, headers = problems(tmp_path)
    assert len(headers) == 1 and len(found) == 1 and "truncated" in found[0]


def run(*arguments: str) -> tuple[int, str, str]:
    done = command_line("weights", *arguments, cwd=Path.cwd())
    return done.returncode, done.stdout, done.stderr


def test_the_command_line(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    write(source / "model.safetensors", tensors())
    write(source / "stale.safetensors", {"a": torch.ones(1)})
    (source / "config.json").write_text("{}")
    (source / "map.py").write_text("from fullshard.weights import Rename\nrules = [Rename('^', 'm.')]\n")
    (source / "map.json").write_text(json.dumps({"scale": "gain"}))
    (tmp_path / ".in.saving" / "token").mkdir(parents=True)
    code, told, _ = run("show", str(source))
    assert code == 0 and "experts.*.w" in told and "[3, 5]" in told
    assert "left over: stale.safetensors" in told and ".in.saving is left over from an unfinished save" in told
    assert "experts.2.w" in run("show", str(source), "--all")[1]
    code, told, _ = run("convert", str(source), str(out), "--map", f"{source}/map.py:rules", "--dtype", "bf16")
    assert code == 0 and "model.safetensors" in told and read(out)["m.scale"].dtype == torch.bfloat16
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "map.json", "map.py", "model.safetensors"]
    assert run("convert", str(source), str(out), "--map", f"{source}/map.json", "--only-weights")[0] == 0
    assert "gain" in read(out)
    assert run("check", str(out))[:2] == (0, f"{out}: 1 file, 13 tensors, {_size(out)}: whole\n")
    os.truncate(out / "model.safetensors", 1000)
    code, told, _ = run("check", str(out))
    assert code == 1 and "truncated by" in told and told.endswith("BAD\n")
    code, _, told = run("show", str(tmp_path / "nothing"))
    assert code == 2 and "No such file" in told
    code, _, told = run("convert", str(source), str(out), "--map", str(tmp_path / "no.json"))
    assert code == 2 and "--map" in told


def _size(folder: Path) -> str:
    from fullshard.wrap.tables import bytes_text

    return bytes_text(sum(header.identity.nbytes for header in read_checkpoint(folder)))
