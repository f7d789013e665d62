"""Small models and the one comparison that most tests are: sharded against unsharded, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from harness import SEED
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import fullshard
from fullshard.comm.backends import collectives_for
from fullshard.comm.base import Collectives
from fullshard.comm.gloo import GlooCollectives

ROWS = 12  # of a global batch: divides by 1, 2, 3 and 4


class Block(nn.Module):
    """Uneven sizes on purpose: 7 and 13 divide by nothing."""

    def __init__(self, dim: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """embedding-like input layer, blocks, head: the shape of a decoder."""

    def __init__(self, depth: int = 3, dim: int = 7, hidden: int = 13) -> None:
        super().__init__()
        self.inp = nn.Linear(5, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard_stack(model: nn.Module, mesh: Any, **options: Any) -> nn.Module:
    """Blocks bottom-up, then the root."""
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=mesh, **options)
    return fullshard.fully_shard(model, mesh=mesh, **options)


class InOrder(GlooCollectives):
    """Has gradients that must be cast, or are cut unevenly, go in slices, as they do on an accelerator."""

    in_order = True


def in_order(group: Any) -> Collectives:
    """Collectives that have gradients go in slices, of the CPU or of the device that tensors are made on."""
    here = torch.empty(0).device
    return InOrder(group) if here.type == "cpu" else collectives_for(group, here)


def batch(step: int, *shape: int) -> Tensor:
    """The same global batch on every rank."""
    return torch.randn(ROWS, *(shape or (5,)), generator=torch.Generator().manual_seed(100 + step + 1000 * SEED))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@lru_cache(256)
def place(
    shape: torch.Size, mesh: DeviceMesh, coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[tuple[int, int]]:
    """(size, offset) of what a rank has, by dim. coordinate: its place in the mesh; ranks may be threads of one process."""
    return list(zip(*compute_local_shape_and_global_offset(shape, mesh, placements)))


def beside(got: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank has of a tensor, and as much of the other: together the ranks compare all, and nothing is sent."""
    if not hasattr(got, "full_tensor"):
        return got, expected
    if not all(type(placement) in (Shard, Replicate) for placement in got.placements):
        return got.full_tensor(), expected
    coordinate = tuple(got.device_mesh.get_coordinate())
    for dim, (size, offset) in enumerate(place(got.shape, got.device_mesh, coordinate, got.placements)):
        expected = expected.narrow(dim, offset if size else 0, size)
    return got.to_local(), expected


def fulls(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`full` of many, by one message for all that are cut over the same dims of a mesh: one by one took a fifth of a small test."""
    whole: list[Tensor] = []
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        cut = getattr(tensor, "placements", ())
        if not all(type(placement) in (Shard, Replicate) for placement in cut):
            whole.append(full(tensor))
            continue
        whole.append(tensor)
        if any(isinstance(placement, Shard) for placement in cut):
            mesh = tensor.device_mesh
            over = tuple(dim for dim, placement in enumerate(cut) if isinstance(placement, Shard))
            whole[-1] = tensor.to_local().new_zeros(tensor.shape)
            part = whole[-1]
            for dim, (size, offset) in enumerate(place(tensor.shape, mesh, tuple(mesh.get_coordinate()), cut)):
                part = part.narrow(dim, offset if size else 0, size)
            part.copy_(tensor.to_local())
            alike.setdefault((mesh, over, tensor.dtype), []).append(whole[-1])
        elif cut:
            whole[-1] = tensor.to_local()
    for (mesh, over, _), mine in alike.items():
        flat = torch.cat([tensor.flatten() for tensor in mine])
        for dim in over:
            dist.all_reduce(flat, group=mesh.get_group(dim))
        for tensor, values in zip(mine, flat.split([tensor.numel() for tensor in mine])):
            tensor.copy_(values.view_as(tensor))
    return whole


def rounding(*of: torch.dtype) -> float:
    """How far two right computations of one value may be apart, relative to the largest value beside it.

    Parts of a batch take other kernels than all of it, and each processor has its own: they add in another order. A sum of n terms
    in random order is off by about sqrt(n) roundings, and none here has more than 4096 terms. What is narrower than float32
    is summed in float32, so that only values on the way are rounded: a few layers, and the sum over the ranks.
    """
    eps = max((torch.finfo(dtype).eps for dtype in of if dtype.is_floating_point or dtype.is_complex), default=0.0)
    return (64 if eps <= torch.finfo(torch.float32).eps else 8) * eps


def largest(tensors: Iterable[Tensor]) -> float:
    return max((tensor.detach().abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def assert_near(
    got: Tensor, expected: Tensor, what: str, tolerance: float | None = None, *, scale: float | None = None
) -> None:
    """Compare the largest difference with `tolerance` (None: of the dtypes) times `scale` (None: the largest value)."""
    got, expected = got.detach(), expected.detach()
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    tolerance = rounding(got.dtype, expected.dtype) if tolerance is None else tolerance
    scale = largest([expected]) if scale is None else scale
    got, expected = beside(got, expected)
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)} instead of {tuple(expected.shape)} on this rank"
    worst = largest([got.double() - expected.to(got.device).double()])  # offloaded shards are the host's
    assert worst <= tolerance * scale, f"{what}: off by {worst:.3g}, largest value {scale:.3g}"


def assert_same_grads(model: nn.Module, reference: nn.Module, tolerance: float | None = None) -> None:
    """Compare with the largest gradient of the model: one that is small or nothing may be the sum of large ones, with their errors.

    Tolerance: None for that of all dtypes of its parameters, for each gradient has been through the others' computation.
    """
    expected = dict(reference.named_parameters())
    scale = largest(parameter.grad for parameter in expected.values() if parameter.grad is not None)
    tolerance = rounding(*dtypes(model), *dtypes(reference)) if tolerance is None else tolerance
    for name, parameter in model.named_parameters():
        want = expected[name].grad
        assert (parameter.grad is None) == (want is None), f"{name}.grad is {parameter.grad}, expected {want}"
        if want is not None:
            assert_near(parameter.grad, want, f"{name}.grad", tolerance, scale=scale)


def assert_same_parameters(model: nn.Module, reference: nn.Module, tolerance: float | None = None) -> None:
    """Compare with the largest weight of the model: one that began at nothing is a sum of gradients, with their errors."""
    expected = dict(reference.named_parameters())
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    scale = largest(expected.values())
    for name, parameter in found.items():
        assert_near(parameter, expected[name], name, tolerance, scale=scale)


def share_grads(model: nn.Module, reference: nn.Module) -> None:
    """Give the reference the gradients of the model, once they were compared, so that both optimizers get the same.

    Adam divides a gradient by its own size: of one near zero it makes a step as large as any, in a direction that is rounding.
    """
    expected = dict(reference.named_parameters())
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name, grad in zip(grads, fulls(grads.values())):
        expected[name].grad = grad.to(expected[name], copy=True)


def square(output: Any) -> Tensor:
    return output.square().mean()


def train_both(
    world: Any,
    model: nn.Module,
    shard: Callable[[nn.Module], Any],
    *,
    steps: int = 5,
    loss: Callable[[Any], Tensor] = square,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    inputs: Callable[[int], Tensor] = batch,
    tolerance: float | None = None,
    between: Callable[[int, nn.Module], None] = lambda step, model: None,
) -> tuple[nn.Module, nn.Module]:
    """Train a sharded copy on parts of the batches and `model` itself on all of them; gradients and weights must agree.

    Tolerance: of gradients. Weights are those that an optimizer made of the same gradients, whatever these were computed in.
    """
    sharded = copy.deepcopy(model)
    shard(sharded)
    ours, theirs = (optimizer(m.parameters(), lr=1e-2) for m in (sharded, model))
    for step in range(steps):
        for m, part in ((sharded, world.mine), (model, lambda x: x)):
            loss(m(part(inputs(step)))).backward()
        assert_same_grads(sharded, model, tolerance)
        share_grads(sharded, model)
        for m, o in ((sharded, ours), (model, theirs)):
            o.step()
            o.zero_grad()
            between(step, m)
    assert_same_parameters(sharded, model)
    return sharded, model
