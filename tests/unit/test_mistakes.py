"""Mistakes on the command line of `explain`: each is one line on stderr that names it, exit status 2, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exits import command_line, script
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard.__main__ import main

LIBRARY = torch.library.Library("mistakes", "DEF")  # lives as long as the process: torch 2.11 still calls what is gone
LIBRARY.define("own(Tensor x) -> Tensor")

FILES = {
    "models.py": """
import functools, logging, os, sys, warnings
import torch
from torch import nn
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

number = 3

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.b(self.a(x).relu())

def of(build, batch=None, **more):
    return {"build": build, "batch": torch.empty(4, 8) if batch is None else batch, "loss": torch.sum, **more}

def good(rows=4):
    return of(lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 4)), torch.empty(rows, 8))
def flat():
    return of(lambda: nn.Linear(8, 8))
def changes(forward, loss=torch.sum, build=None, **more):
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.e = nn.Linear(8, 8), nn.Embedding(10, 8)
            if build:
                build(self)
        def forward(self, x):
            return forward(self, x)
    return of(Changed, loss=loss, **more)

# factories
def raises(): raise RuntimeError("no data")
def ends(): sys.exit(0)
def nothing(): return None
def three(): return 1, 2, 3
def a_model(): return nn.Linear(2, 2), torch.empty(2, 2)
def needs(x): return good()
def on_cuda(): return of(lambda: nn.Linear(8, 8), torch.empty(2, 8, device="cuda:7"))
def no_batch(): return {"build": lambda: nn.Linear(8, 8)}
def words(): return of(lambda: nn.Linear(8, 8), "words")
def empty(): return of(lambda: nn.Linear(8, 8), ())
def no_rows(): return of(lambda: nn.Linear(8, 8), torch.empty(0, 8))
def more(): return {**good(), "lr": 3}

# models
def build_raises(): return of(lambda: 1 / 0)
def build_item(): return of(lambda: nn.Linear(int(torch.linspace(0, 8, 2)[1].item()), 8))
def build_number(): return of(lambda: 3)
def built(): return of(nn.Linear(8, 8))
def scripted():
    return of(lambda: torch.jit.script(nn.Linear(8, 8)))
def data_parallel(): return of(lambda: nn.DataParallel(nn.Linear(8, 8)))
def lazy(): return of(lambda: nn.LazyLinear(8))
def nothing_to_train(): return of(lambda: nn.Linear(8, 8).requires_grad_(False))
def no_parameters(): return of(lambda: nn.ReLU())
def sharded():
    def make():
        model = nn.Linear(8, 8)
        from torch.distributed.tensor import DTensor
        model.weight = nn.Parameter(model.weight)
        return model
    return of(make)

# steps
def narrow(): return of(lambda: nn.Linear(8, 8), torch.empty(4, 7))
def hooked():
    def make():
        model = nn.Linear(8, 8)
        model.register_forward_hook(hook)
        return model
    return of(make)
def hook(module, args, output): raise AssertionError("never on meta")
def bad_loss(): return of(lambda: nn.Linear(8, 8), loss=lambda out: out["logits"])
def long_loss(): return of(lambda: nn.Linear(8, 8), loss=lambda out: out)
def number_loss(): return of(lambda: nn.Linear(8, 8), loss=lambda out: 3.0)
def no_loss(): return {"build": lambda: nn.Linear(8, 8), "batch": torch.empty(4, 8)}
def detached(): return of(lambda: nn.Linear(8, 8), loss=lambda out: out.detach().sum())
def sparse():
    return of(lambda: nn.Embedding(10, 8, sparse=True), torch.zeros(4).long())
def autocast(): return changes(lambda m, x: torch.autocast("cpu", torch.bfloat16).__enter__() or m.a(x))
def item(): return changes(lambda m, x: m.a(x) * m.a(x).sum().item())
def branch(): return changes(lambda m, x: m.a(x) if m.a(x).sum() > 0 else m.a(m.a(x)))
def tolist(): return changes(lambda m, x: m.a(x) * len(m.a(x).tolist()))
def numpy(): return changes(lambda m, x: m.a(x) * float(m.a(x).detach().float().numpy().sum()))
def chosen(): return changes(lambda m, x: m.a(x[m.a(x)[:, 0] > 0]))
def to_cuda(): return changes(lambda m, x: m.a(x.to("cuda:7")))
def offloads():
    def forward(m, x):
        with torch.autograd.graph.save_on_cpu():
            return m.a(x)
    return changes(forward)
def steps_in_backward():
    def hook(p): p.grad = None
    def build(m): [p.register_post_accumulate_grad_hook(hook) for p in m.a.parameters()]
    return changes(lambda m, x: m.a(x), build=build)
def sparse_call():
    return changes(lambda m, x: F.embedding(x, m.a.weight, sparse=True), batch=torch.zeros(4).long())
def needs_more():
    class Two(nn.Linear):
        def forward(self, x, mask): return super().forward(x)
    return of(lambda: Two(8, 8))
def mixed(): return changes(lambda m, x: m.a(x.float()), mp=1)
def own_backward():
    def forward(m, x):
        m.a(x).sum().backward()
        return m.a(x)
    return changes(forward)
def in_place():
    def forward(m, x):
        y = m.a(x).exp()
        z = y * 2
        y.add_(1)
        return z
    return changes(forward)
def distributed(): return changes(lambda m, x: torch.distributed.all_reduce(x) or m.a(x))
def backward_raises():
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): raise ValueError("not today")
    return changes(lambda m, x: Raises.apply(m.a(x)))
def int8(): return changes(lambda m, x: x @ torch.zeros(8, 8, dtype=torch.int8) + m.a(x))
def double(): return changes(lambda m, x: m.a(x.double()))
def makes_cuda(): return changes(lambda m, x: m.a(x) + torch.zeros(8, device="cuda"))
def keyword_only():
    class Masked(nn.Linear):
        def forward(self, x, *, mask): return super().forward(x)
    return of(lambda: Masked(8, 8))
def fsdp2_in_build():
    def make():
        from torch.distributed.fsdp import fully_shard
        model = nn.Linear(8, 8)
        fully_shard(model)
        return model
    return of(make)
def ours_in_build():
    def make():
        import fullshard
        return fullshard.shard_model(nn.Linear(8, 8))
    return of(make)
def fsdp1():
    def make():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        try:
            return torch.distributed.fsdp.FullyShardedDataParallel(nn.Linear(8, 8, device="cpu"), device_id=torch.device("cpu"))
        finally:
            torch.distributed.destroy_process_group()
    return of(make)
def mse(): return of(lambda: nn.Linear(8, 8), loss="mse")
def listed(): return {**good(), "footprints": [3]}
def no_number(): return of(lambda: nn.Linear(8, 8), lambda: torch.empty(4, 8))
def warns():
    import warnings
    warnings.warn("rows are few")
    return of(lambda: nn.Linear(8, 8), torch.empty(4, 7))
a_module = nn.Linear(8, 8)
def own_operator():
    return changes(lambda m, x: torch.ops.mistakes.own(m.a(x)))

def shares_sequences():
    def forward(m, x):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        with context_parallel(init_device_mesh("cpu", (4,)), buffers=[x], buffer_seq_dims=[2]):
            q = m.a(x)
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return changes(forward, batch=torch.empty(2, 4, 128, 8))

logging.basicConfig()
def logs():
    logging.getLogger("mine").warning("of the factory")
    warnings.warn("mixed")
    return good()

# answers with a note
def synced(): return of(lambda: nn.Sequential(nn.Linear(8, 8), nn.SyncBatchNorm(8)))
def recurrent():
    return of(lambda: nn.LSTM(8, 8), torch.empty(5, 4, 8), loss=lambda out: out[0].sum())
def convolved():
    return of(lambda: nn.Conv2d(3, 8, 3), torch.empty(4, 3, 16, 16))
def one_unit():
    return changes(lambda m, x: m.c(m.b(m.a(x))), build=lambda m: (setattr(m, "b", nn.LayerNorm(8)), setattr(m, "c", nn.Linear(8, 8))))
def unused(): return changes(lambda m, x: m.a(x))
def penalty():
    def forward(m, x):
        x = x.requires_grad_()
        out = m.a(x).relu().square()
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + grad
    return changes(forward)
def reduces(): return changes(lambda m, x: torch.distributed.all_reduce(y := m.a(x)) or y)
def broadcasts():
    import torch.distributed._functional_collectives as c
    return changes(lambda m, x: m.a(x) + c.broadcast(x, 0, torch.distributed.group.WORLD))

# plans
whole = "auto"
def plan_raises(*args): raise LookupError("no plan")
a_number = 3
""",
    "syntax.py": "def small(:\n    pass\n",
    "raises.py": "import torch\nraise RuntimeError('not on this machine')\n",
    "ends.py": "import sys\nsys.exit(0)\n",
    "imports.py": "import not_installed_here\n",
    "relative.py": "from . import models\n",
    "empty.py": "",
    "bad.json": "{",
    "other.json": '{"gpu": {"name": "mine", "speed": 3}}',
    "slow.json": '{"gpu": {"name": "mine", "memory": 1, "bf16": 1, "fp32": 1, "bandwidth": 0, "link": 1}}',
}

CASES: list[tuple[str, str]] = [
    # files
    ("syntax.py:small --world 4", r"SyntaxError: .*\(at syntax.py:1\)"),
    ("raises.py:small --world 4", r"RuntimeError: not on this machine \(at raises.py:2\)"),
    ("ends.py:small --world 4", r"ends.py ends the program when it is imported"),
    ("imports.py:small --world 4", r"imports 'not_installed_here', which is not installed"),
    ("empty.py:small --world 4", r"'empty.py' has no 'small'. It has nothing callable"),
    ("missing.py:small --world 4", r"missing.py is not a file"),
    ("folder.py:small --world 4", r"folder.py is a directory"),
    ("models.py --world 4", r"Expected module:name or file.py:name, got 'models.py'"),
    (":good --world 4", r"Expected module:name"),
    ("models.py: --world 4", r"Expected module:name"),
    ("models.txt:good --world 4", r"No module named 'models.txt|No module named 'models'|models.txt"),
    ("models.py:missing --world 4", r"has no 'missing'. It has Block, of, good"),
    ("models.py:number --world 4", r"to be a function that returns .*, got a int"),
    # factories
    ("models.py:raises --world 4", r"models.py:raises raises RuntimeError: no data \(at models.py:\d+\)"),
    ("models.py:ends --world 4", r"models.py:ends raises SystemExit"),
    ("models.py:nothing --world 4", r"Expected the factory to return \(build, batch\).*got a NoneType"),
    ("models.py:three --world 4", r"got 3 values: int, int, int"),
    ("models.py:a_model --world 4", r"build must be a function that returns the model|got 2 values"),
    ("models.py:needs --world 4", r"needs\(x\).*missing a required argument: 'x'.*--with NAME=VALUE"),
    ("models.py:on_cuda --world 4", r"models.py:on_cuda raises .*(CUDA|NVIDIA|cuda).*\(at models.py:\d+\)"),
    ("models.py:no_batch --world 4", r"got a dict of build"),
    ("models.py:words --world 4", r"batch must be a tensor"),
    ("models.py:empty --world 4", r"batch has no tensor"),
    ("models.py:no_rows --world 4", r"batch has no rows"),
    ("models.py:more --world 4", r"The factory returns 'lr', which is no argument of explain"),
    ("models.py:good --world 4 --with rows", r"--with takes NAME=VALUE"),
    ("models.py:good --world 4 --with deep=3", r"--with does not match the factory, good\(rows=4\)"),
    ("models.py:good --world 4 --with rows=many", r"raises TypeError"),
    # models
    ("models.py:build_raises --world 4", r"build\(\) raises ZeroDivisionError.*at models.py:\d+"),
    ("models.py:build_item --world 4", r"build\(\) fails.*Create the tensors whose values it reads under torch.device\('cpu'\)"),
    ("models.py:build_number --world 4", r"build\(\) must return an nn.Module, got a int"),
    ("models.py:built --world 4", r"build must be a function that returns the model.*got a module"),
    ("models.py:scripted --world 4", r"is TorchScript"),
    ("models.py:data_parallel --world 4", r"is a DataParallel.*Return the module inside"),
    ("models.py:lazy --world 4", r"'weight' has no shape before a first forward"),
    ("models.py:nothing_to_train --world 4", r"depends on no trainable parameter"),
    ("models.py:no_parameters --world 4", r"no trainable parameter|no parameters"),
    # steps
    ("models.py:narrow --world 4", r"does not accept this batch.*4, 7"),
    ("models.py:hooked --world 4", r"AssertionError: never on meta \(.*at models.py:\d+\)"),
    ("models.py:bad_loss --world 4", r"The loss raises .*\(at models.py:\d+\), called with the output of the model"),
    ("models.py:long_loss --world 4", r"loss= expected a function that returns a tensor of one element, got shape \(4, 8\)"),
    ("models.py:number_loss --world 4", r"a function that returns a tensor of one element, got a float"),
    ("models.py:no_loss --world 4", r"which is no loss. Pass explain\(loss="),
    ("models.py:detached --world 4", r"The loss depends on no trainable parameter"),
    ("models.py:sparse --world 4", r"the model that build\(\) returns is an Embedding with sparse=True.*sparse=False"),
    ("models.py:autocast --world 4", r"torch.autocast.*mp_policy"),
    ("models.py:offloads --world 4", r"save_on_cpu, with which the model keeps activations in host memory"),
    ("models.py:item --world 4", r"models.py:\d+ \(.*\) reads a number that depends on data.*--footprint models.py:\d+="),
    ("models.py:branch --world 4", r"models.py:\d+ \(.*\) depends on data, and the step depends on it .*--footprint models.py:\d+=True"),
    ("models.py:tolist --world 4", r"models.py:\d+ \(.*\) copies values to the host"),
    ("models.py:numpy --world 4", r"models.py:\d+ \(.*\) copies values to the host"),
    ("models.py:chosen --world 4", r"aten::nonzero.*routed"),
    ("models.py:to_cuda --world 4", r"The forward uses an explicit device .*models.py:\d+"),
    ("models.py:needs_more --world 4", r"does not accept this batch.*missing 1 required positional argument: 'mask'"),
    ("models.py:own_backward --world 4", r"The forward or the loss runs a backward, which computes"),
    ("models.py:in_place --world 4", r"The backward raises RuntimeError: .*modified by an inplace operation"),
    ("models.py:distributed --world 4", r"The forward needs a process group, but explain\(\) creates none .*models.py:\d+"),
    ("models.py:backward_raises --world 4", r"The backward raises ValueError: not today \(at models.py:\d+\)"),
    ("models.py:own_operator --world 4", r"mistakes::own.*register"),
    # options
    ("models.py:good", r"the following arguments are required: --world"),
    ("--world 4", r"required: factory"),
    ("models.py:good --world four", r"--world: invalid int value: 'four'"),
    ("models.py:good --world 0", r"world must be an int of at least 1, got 0"),
    ("models.py:good --world -2", r"world must be an int of at least 1, got -2"),
    ("models.py:good --world 12", r"world=12 is no multiple of the 8 h100-sxm of one machine"),
    ("models.py:good --world 4 --per-node 0", r"per_node must be"),
    ("models.py:good --wrld 4", r"required: --world"),
    ("models.py:good --world 4 --microbatch 2 --recomputation block", r"unrecognized arguments: --recomputation block"),
    ("models.py:good --world 4 --mesh 2by2", r"--mesh takes sizes, as in 8x16"),
    ("models.py:good --world 4 --mesh 3x2", r"mesh must have as many ranks as the world, 4, got 3 x 2 = 6 ranks"),
    ("models.py:good --world 8 --mesh 2x2x2", r"mesh must be one or two sizes"),
    ("models.py:good --world 4 --gpu h900", r"gpu='h900' is unknown. Pass one of a100-40"),
    ("models.py:good --world 4 --gpu missing.json", r"gpu='missing.json' does not exist"),
    ("models.py:good --world 4 --gpu bad.json", r"gpu='bad.json' is no file of `calibrate`"),
    ("models.py:good --world 4 --gpu other.json", r"gpu='other.json' is no file of `calibrate` .*speed"),
    ("models.py:good --world 4 --gpu folder.json", r"gpu='folder.json' is a directory"),
    ("models.py:good --world 4 --net pigeon", r"net='pigeon' is unknown. Pass one of ib-200"),
    ("models.py:good --world 4 --plan models.py:missing", r"has no 'missing'"),
    ("models.py:good --world 4 --plan models.py:a_number", r"policy|plan"),
    ("models.py:good --world 4 --plan models.py:plan_raises", r"LookupError: no plan|policy|plan"),
    ("models.py:good --world 4 --plan models.py:whole --plan models.py:whole --find fits", r"--find searches from one plan"),
    ("models.py:good --world 4 --dtype fp8", r"--dtype: invalid choice: 'fp8'"),
    ("models.py:good --world 4 --reduce-dtype fp8", r"--reduce-dtype: invalid choice"),
    ("models.py:good --world 4 --reshard maybe", r"--reshard takes true, false, or a number of ranks"),
    ("models.py:good --world 4 --reshard 3", r"reshard_after_forward=3 must divide the 4 ranks"),
    ("models.py:good --world 4 --optimizer adamm", r"optimizer must be one of adamw"),
    ("models.py:good --world 4 --microbatches 0", r"microbatches must be an int of at least 1, got 0"),
    ("models.py:good --world 4 --microbatches x", r"--microbatches: invalid int value"),
    ("models.py:good --world 4 --recompute all", r"recompute must be 'none', 'block'"),
    ("models.py:good --world 4 --recompute every:0", r"recompute must be 'none', 'block'"),
    ("models.py:flat --world 4 --recompute block", r"recompute='block' recomputes blocks, but this plan has none"),
    ("models.py:good --world 4 --engine deepspeed", r"--engine: invalid choice"),
    ("models.py:good --world 4 --find cheapest", r"--find: invalid choice: 'cheapest'"),
    ("models.py:good --world 4 --footprint nonsense", r"--footprint takes NAME=VALUE"),
    ("models.py:good --world 4 --footprint nonsense=3", r"footprints expected the name of an operator, .*, got 'nonsense'"),
    ("models.py:good --world 4 --footprint aten::nonzero=routed(3)", r"routed\(\) expected a share between 0 and 1"),
    ("models.py:good --world 4 --html missing/a.html", r"--html 'missing/a.html' cannot be written: there is no directory"),
    ("models.py:good --world 4 --html folder.py", r"--html 'folder.py' cannot be written: expected the path of a file"),
    ("models.py:good --world 4 --json /dev/full", r"--json '/dev/full' cannot be written: No space left"),
    ("models.py:good --world 4 --html models.py", r"--html 'models.py' is read by this command and would be overwritten"),
    ("models.py:good --world 4 --gpu slow.json --json slow.json", r"--json 'slow.json' is read by this command"),
    ("models.py:good --world 4 --gpu slow.json", r"gpu='slow.json' is no file of `calibrate` \(bandwidth is 0, expected a number above 0"),
    ("models.py:good --world 4 --png a.docx", r"--png takes a path that ends in .png, got 'a.docx'"),
    ("models.py:good --world 4 --mesh 2x²", r"--mesh takes sizes"),
    ("models.py:good --world 4 --with rows=2 --with rows=4", r"--with has 'rows' twice"),
    ("models.py:chosen --world 4 --footprint aten::nonzero=routed(1/0)", r"--footprint aten::nonzero takes a number"),
    ("models.py:chosen --world 4 --footprint aten::nonzero=7", r"The footprint of aten.nonzero returns 7, but the operator returns a tensor"),
    ("models.py:good --world 4 --microbatches 100000", r"microbatches must be at most 4,096"),
    ("models.py:good --world 4 --plan whole", r"--plan whole: Expected module:name or file.py:name"),
    ("models.py:steps_in_backward --world 4", r"The gradient of 'a.\w+' is missing after its accumulation"),
    ("models.py:sparse_call --world 4", r"The step creates a sparse tensor.*sparse=False"),
    # what is asked of meta, and cannot be
    ("models.py:int8 --world 4", r"aten.mm cannot multiply bfloat16 and int8: devices need.* \(at models.py:\d+\)"),
    ("models.py:double --world 4", r"cannot multiply bfloat16 and float64: devices need.* \(in 'a', at models.py:\d+\)"),
    ("models.py:makes_cuda --world 4", r"The forward uses an explicit device .*models.py:\d+.*device=x.device"),
    ("models.py:keyword_only --world 4", r"'mask'.*Pass a dict of arguments by name"),
    ("models.py:fsdp2_in_build --world 4", r"build\(\) needs a process group.*models.py:\d+.*Return the model of one rank as it is before"),
    ("models.py:ours_in_build --world 4", r"build\(\) needs a process group.*models.py:\d+.*Return the model of one rank as it is before"),
    ("models.py:fsdp1 --world 4", r"is sharded already \(FullyShardedDataParallel\). Return the model as it is before"),
    ("models.py:mse --world 4", r"loss must be a function of the model's output"),
    ("models.py:listed --world 4", r"footprints must be a dict"),
    ("models.py:no_number --world 4", r"batch is a function, which is called with the number of a step.*raises TypeError"),
    ("models.py:warns --world 4", r"does not accept this batch"),
    ("models.py:a_module --world 4", r"to be a function that returns .*, got a module \(Linear\)"),
    ("relative.py:good --world 4", r"relative.py is part of a package .*Pass module:name, as in package.file:good"),
    ("models.py:good --world 4 --mesh 0x8", r"--mesh takes sizes, as in 8x16, got '0x8'"),
    ("models.py:good --world 4 --budget 0.9", r"unrecognized arguments: --budget 0.9 \("),
    ("models.py:good --world 4 --plan raises.py:whole", r"--plan raises.py:whole: raises.py raises RuntimeError: not on this machine"),
    ("models.py:good --world 4 --json a.json --perfetto a.json", r"--perfetto and --json are both 'a.json'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in {**FILES, "json.py": FILES["models.py"], "torch.py": FILES["models.py"]}.items():
        (folder / name).write_text(text)
    (folder / "folder.py").mkdir()
    (folder / "folder.json").mkdir()
    return folder


@pytest.fixture(autouse=True)
def _as_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each command sees modules and paths as a process of its own."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(folder) in str(sys.modules[name].__file__):
            del sys.modules[name]


def run(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fullshard", "explain", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize("arguments, told", CASES, ids=[arguments for arguments, _ in CASES])
def test_a_mistake_is_one_line_and_status_2(
    arguments: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(arguments, monkeypatch, capsys)
    assert status == 2 and len(err.splitlines()) == 1, (status, err, out[:200])
    assert re.search(told, err), err
    assert "written" not in out


@pytest.mark.parametrize("name", ["json.py", "torch.py"])
def test_a_file_with_the_name_of_a_module_that_is_loaded_is_taken_by_its_path(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(f"{name}:good --world 4", monkeypatch, capsys)
    assert status == 0 and out.startswith("fits: ")


def test_the_command_is_one_line_whatever_the_directory_holds_and_the_program_warns_of(folder: Path, tmp_path: Path) -> None:
    """The `fullshard` of a pip install: a json.py, random.py or torch.py beside the model is not taken for the library's."""
    entry = tmp_path / "bin" / "fullshard"
    entry.parent.mkdir()
    entry.write_text("import sys\nfrom fullshard.__main__ import main\nsys.exit(main())\n")
    (folder / "random.py").write_text("raise RuntimeError('not the standard library')\n")
    arguments = ["explain", "json.py:warns", "--world", "4"]
    ran = subprocess.run([sys.executable, str(entry), *arguments], cwd=folder, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (2, "") and len(ran.stderr.splitlines()) == 1, ran.stderr
    assert ran.stderr.startswith("fullshard: The model does not accept this batch")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("run no.py", "there is no file 'no.py'."),
        ("run -m no.module", "there is no module 'no.module'."),
        ("calibrate --out no/x.json", "--out 'no/x.json' cannot be written: there is no directory"),
    ],
)
def test_a_command_that_cannot_begin_says_so_in_one_line(folder: Path, arguments: str, told: str) -> None:
    """`run` printed a traceback, and `calibrate` measured for minutes before it found that it could not write."""
    ran = command_line(*arguments.split(), cwd=folder.parent)
    assert (ran.returncode, ran.stdout, len(ran.stderr.splitlines())) == (2, "", 1) and told in ran.stderr, ran.stderr


def test_what_a_program_logs_and_warns_of_reaches_stderr(folder: Path) -> None:
    """Handlers keep the stream that they found when the file was imported."""
    code = "from fullshard.__main__ import main; main()"
    ran = script(code, "explain", str(folder / "models.py:logs"), "--world", "4", cwd=folder.parent)
    lines = ran.stderr.splitlines()
    assert ran.returncode == 0 and lines[0] == "WARNING:mine:of the factory", ran.stderr
    assert lines[1].endswith("UserWarning: mixed"), "warnings come behind the answer"


# --- answers say what they leave out ---

LEFT_OUT: list[tuple[str, str]] = [
    ("synced", r"SyncBatchNorm runs collectives of its own, which are not simulated"),
    ("recurrent", r"recurrent layers are traced step by step, .* an LSTM on the CPU took up to twice"),
    ("convolved --gpu cpu", r"convolutions on the CPU copy tensors .* the peak may be up to \d+\.\d KiB higher"),
    ("one_unit", r"the plan has one unit, the whole model: all parameters are all-gathered at once"),
    ("unused", r"no gradient reaches 'e.weight': all-gathered with their units, but not reduced"),
    ("penalty", r"the forward or the loss computes gradients, as a gradient penalty does"),
    ("reduces", r"the step runs collectives of its own \(c10d::allreduce_\), which are not simulated"),
    ("broadcasts", r"the step runs collectives of its own \(_c10d_functional::broadcast\), which are not simulated"),
]


def test_context_parallelism_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        status, out, err = run("models.py:shares_sequences --world 4", monkeypatch, capsys)
    finally:
        torch.distributed.destroy_process_group()
    assert (status, out) == (2, "")
    assert re.search(r"cannot simulate torch's context_parallel, .* \(at models.py:\d+\)$", err.strip()), err


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("factory, told", LEFT_OUT, ids=[f"{name}-{told[:20]}" for name, told in LEFT_OUT])
def test_an_answer_says_what_it_leaves_out(
    factory: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if factory in ("reduces", "broadcasts"):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        status, out, err = run(f"models.py:{factory} --world 4", monkeypatch, capsys)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert (status, err) == (0, "")
    assert re.search(f"^note: .*{told}", out, re.MULTILINE), out
