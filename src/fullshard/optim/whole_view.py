"""`whole_view`: steps of other libraries' optimizers on whole parameters, each on its owner (Shampoo, SOAP)."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import is_
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard import _torch
from fullshard.core import ShardedParameter, logical_parameters, owner_of, to_local
from fullshard.errors import StateError
from fullshard.optim.local_steps import is_element_wise
from fullshard.optim.local_view import is_viewed
from fullshard.optim.matrix_owners import by_mesh, exchange_of, plan_of
from fullshard.optim.muon import is_muon
from fullshard.optim.owner_exchange import Fill, OwnerExchange, copy_into
from fullshard.optim.owners import Cost
from fullshard.optim.pieces import Piece, Split, Splits, current, pieces_of

_ROUNDING = 1e-2  # how far two right steps of one parameter may be apart, relative to the step

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)

_VIEW = "_fullshard_whole_view"  # attribute of an optimizer: its _WholeView
CACHE = "_fullshard_stepper"  # attribute of an optimizer: what optimizer_hooks.py knows of its steps
_SPLITS = "_fullshard_splits"  # attribute of a Muon: how its matrices are split


def whole_view(
    optimizer: OptimizerT, *, split: Split | None = None, cost: Cost | None = None, restorable: bool = True
) -> OptimizerT:
    """Make an optimizer of another library step on whole parameters, each on the rank that owns it.

    For optimizers that compute with a parameter as a whole, as Shampoo, SOAP or LAMB. Each parameter has an owner. In a step
    its gradient and weight travel there, the optimizer's own `step` runs on the owner with plain Parameters, and the new
    weight travels back. The states of a parameter, factors of any shape among them, are on its owner only. The optimizer must
    compute each parameter from this parameter, its gradient, its state and the options alone. One that combines several raises
    an error as soon as its options differ between ranks, as Prodigy's estimate of the distance does, or as a parameter steps
    otherwise alone than with others, as with clipping by the norm of all gradients. The latter is tried with one parameter in
    the steps 1, 2, 4, 8 and so on.

    Outside of the step, `param_groups` hold the sharded parameters as before, so clipping, GradScaler and schedulers work
    unchanged. `state_dict()` has the states of the own parameters on each rank. torch.distributed.checkpoint saves them all,
    under names that do not depend on the owner, and loads them with another number of ranks, into an optimizer that has
    stepped once.

    `torch.optim.Muon` needs no call; with `split`, it computes with the pieces. A copy of an optimizer, by copy.deepcopy or
    pickle, needs a call of its own: Optimizer copies options and states only.

    Args:
        optimizer: a `torch.optim.Optimizer` whose class defines `step`. Call this after fully_shard(), and before other code
            wraps `step`, for example before a scheduler is created.
        split: the pieces of parameters that are several matrices: a number of equal pieces or their sizes along dim 0, or
            `Pieces`. Each piece is a parameter of its own inside the step.
        cost: function of a `Matrix` that returns the time of a step for it, in any unit; None for that of Newton-Schulz.
        restorable: True to copy the states of own parameters during a step, so that they are as before if a rank fails; False
            to save this memory: then a failed step leaves the optimizer unusable until a state dict is loaded.

    Returns:
        The same `optimizer`.

    Raises:
        ValueError: if it is not an optimizer, is element-wise (which needs no whole parameters), has states or a `local_view`
            already, keeps its parameters in attributes, has a `step` that was replaced, or if a parameter cannot be split like
            this.

    Example:
        >>> optimizer = fullshard.whole_view(SOAP(model.parameters(), lr=3e-3))               # doctest: +SKIP
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"whole_view takes a torch.optim.Optimizer, got {name}. Build the optimizer and pass it.")
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    splits = Splits(split, members)
    if is_muon(optimizer):
        if cost is not None or not restorable:
            raise ValueError(
                f"Expected no cost and no restorable for {name}, got cost={cost!r} and restorable={restorable!r}. The cost of "
                "Newton-Schulz is known, and a step writes nothing before all ranks have all results."
            )
        optimizer.__dict__[_SPLITS] = splits
        optimizer.__dict__.pop(CACHE, None)
        return optimizer
    if is_element_wise(optimizer) or is_viewed(optimizer):
        raise ValueError(f"{name} is element-wise: it steps shards, faster, and needs no whole_view.")
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"whole_view cannot wrap the step of this {name}, which was replaced, for example by a scheduler. Call whole_view "
            "directly after the optimizer is built."
        )
    known = set(map(id, members))
    for key, value in vars(optimizer).items():
        if isinstance(value, (list, tuple)) and any(id(one) in known for one in value):
            raise ValueError(
                f"{name} keeps its parameters in its attribute '{key}' as well, where whole_view cannot replace them. Use a "
                "version that reads them from param_groups, unless it combines parameters, as LBFGS does."
            )
    if any(optimizer.state.values()):
        raise ValueError(f"This {name} has states already. Call whole_view before the first step, and load states after it.")
    view = _WholeView(optimizer, splits, cost, restorable)
    optimizer.__dict__[_VIEW] = view
    optimizer.step = MethodType(_HOOKED_STEP, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(lambda _: view.note_loaded())
    return optimizer


def has_whole_view(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's step runs on whole parameters."""
    return _VIEW in optimizer.__dict__


def splits_of(optimizer: Optimizer) -> Splits | None:
    """Return how the matrices of a Muon are split; None if each is one."""
    return optimizer.__dict__.get(_SPLITS)


class _Mesh:
    """Pieces that are distributed over the same process groups, with the plan of their owners and the exchanges so far."""

    def __init__(self, pieces: list[Piece], dtype: torch.dtype, cost: Cost | None, doing: str) -> None:
        self.pieces, self.plan, self._dtype, self._doing = pieces, plan_of(pieces, dtype, cost), dtype, doing
        self._known: tuple[list[int], OwnerExchange] | None = None

    def exchange(self, indices: list[int]) -> OwnerExchange:
        """Return the exchange of some of the pieces, with the owners of the whole plan. Collective if they are others."""
        if self._known is None or self._known[0] != indices:
            plan, pieces = self.plan.only(indices), [self.pieces[index] for index in indices]
            self._known = indices, exchange_of(pieces, plan, self._dtype, self._doing)
        return self._known[1]


class _Tried(Exception):
    """Ends a trial of a step, so that everything is undone."""


@dataclass(frozen=True, slots=True)
class _StepAlone:
    """Step of one parameter without others."""

    piece: Piece
    before: Tensor  # the weight
    change: Tensor  # of the weight

    def agrees(self, plain: dict[int, nn.Parameter]) -> bool:
        """Return True if the parameter changed alike with all others, up to rounding of kernels that take several tensors."""
        change = plain[id(self.piece)].detach() - self.before
        return not (self.change - change).norm() > _ROUNDING * change.norm()  # True also for NaN


class _Undo:
    """States, options and counters of an optimizer before a step, and the weights of its parameters that are not sharded."""

    def __init__(self, optimizer: Optimizer, states: dict[Any, Any], plain: list[Tensor]) -> None:
        self._optimizer, self._keys, self._states = optimizer, list(states), copy.deepcopy(list(states.values()))
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        self._numbers = _own_numbers(optimizer)
        self._weights = [(one, one.detach().clone()) for one in plain]

    def run(self) -> dict[Any, Any]:
        """Restore options, counters and weights, and return the states."""
        for group, before in zip(self._optimizer.param_groups, self._groups):
            for key in [key for key in group if key not in before and key != "params"]:
                del group[key]
            for key, value in before.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # the caller may hold this tensor
                else:
                    group[key] = value
        vars(self._optimizer).update(self._numbers)
        for weight, copied in self._weights:
            weight.detach().copy_(copied)
        return dict(zip(self._keys, self._states))


class _WholeView:
    """The steps of one optimizer on whole parameters.

    The step of all ranks, in order: gradients and weights travel to the owners; the optimizer's class steps there; the new
    weights travel back; all ranks agree that this worked everywhere; then shards are written. So a failure on any rank leaves
    weights, states and options as they were.
    """

    def __init__(self, optimizer: Optimizer, splits: Splits, cost: Cost | None, restorable: bool) -> None:
        self._doing = f"{type(optimizer).__name__}.step()"
        self._splits, self._cost, self._restorable = splits, cost, restorable
        self._members: list[list[Any]] = []  # the `params` of the optimizer's groups
        self._logical: list[ShardedParameter] = []
        self._dtypes: list[torch.dtype] = []  # of their shards
        self._meshes: list[_Mesh] = []
        self._plain: dict[int, nn.Parameter] = {}  # the whole parameter inside the step, by id of its piece
        self._loaded = False  # True between a load and the next step
        self._has_stepped = False  # True if there may be states, on this rank or on others
        self._count = 0  # steps so far
        self.broken = ""  # why a step cannot follow, if one failed halfway

    def note_loaded(self) -> None:
        """Note that a state dict was loaded."""
        self._loaded, self._has_stepped, self.broken = True, True, ""

    def step(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        """Run `step`, which calls the function of the optimizer's class, on whole parameters. Collective."""
        if self.broken:
            raise StateError(f"{self._doing} {self.broken}")
        self._list_pieces(optimizer)
        unit = owner_of(self._logical[0]) if self._logical else None
        with torch.no_grad(), nullcontext() if unit is None else unit.runtime.communicator.reporting_exceptions(self._doing):
            if self._loaded:
                self._check_states(optimizer)
            try:
                return self._step(optimizer, step)
            except BaseException as failure:
                if not self._restorable:
                    self.broken = (
                        f"failed before ({type(failure).__name__}), and restorable=False kept no copy of the states. Load a "
                        "checkpoint's optimizer state."
                    )
                raise

    def _step(self, optimizer: Any, step: Callable[[], Any]) -> Any:
        with ExitStack() as calls:
            used = []
            for mesh in self._meshes:
                indices = [i for i, piece in enumerate(mesh.pieces) if piece.parameter.sharded.grad is not None]
                if indices:
                    exchange = mesh.exchange(indices)
                    calls.enter_context(exchange.call())
                    used.append((exchange, [mesh.pieces[index] for index in indices]))
            owned = [(pieces[index], *each) for exchange, pieces in used for index, each in _arrived(exchange, pieces).items()]
            self._count += 1
            alone = None
            if self._count & (self._count - 1) == 0 and len(owned) > 1 and not all(exchange.is_alone for exchange, _ in used):
                alone = self._first_alone(optimizer, owned, step)
            with self._inside(optimizer, owned):
                before = _numbers(optimizer)
                result = step()
                stepped = {id(piece): self._plain[id(piece)].detach().view(piece.whole.shape) for piece, _, _ in owned}
                parts = [
                    exchange.to_shards({index: stepped[id(pieces[index])] for index in exchange.owned})
                    for exchange, pieces in used
                ]
                now = _numbers(optimizer)
                changed = repr([(key, value) for key, value in now.items() if before.get(key, before) != value])
                combines = alone is not None and not alone.agrees(self._plain)
                # A rank that found a combination sends what no other rank does.
                told = f"{changed} {dist.get_rank()}" if combines else changed
                confirmed = [exchange.confirm(told.encode()) for exchange, _ in used]
                if not all(confirmed) or combines:
                    raise StateError(
                        f"{self._doing}: the options of {type(optimizer).__name__} differ between ranks after the step, or a "
                        "parameter alone would have stepped otherwise. It combines several parameters, of which each rank has "
                        "its own; whole_view() is for optimizers that compute each parameter alone. Turn off what combines "
                        "them, as clipping by the norm of all gradients, and do it before the step."
                    )
            for (_, pieces), results in zip(used, parts):
                for piece, part in zip(pieces, results):
                    piece.part(piece.parameter.local).copy_(part)
                    # Every parameter has a state, as torch.distributed.checkpoint expects: an empty one if others own it.
                    optimizer.state.setdefault(piece.parameter.sharded, {})
        self._has_stepped = True
        return result

    def _first_alone(self, optimizer: Any, owned: list[tuple[Piece, Tensor, Tensor]], step: Callable[[], Any]) -> _StepAlone:
        """Return how the first of these parameters steps without the others, which is undone again."""
        places = {id(member): place for place, member in enumerate(m for listed in self._members for m in listed)}
        piece, weight, grad = min(owned, key=lambda one: places[id(one[0].parameter.sharded)])
        before = weight.clone()
        with torch.random.fork_rng([weight.device] if weight.device.type == "cuda" else []), suppress(_Tried):
            with self._inside(optimizer, [(piece, weight.clone(), grad.clone())], is_trial=True):
                step()
                found = self._plain[id(piece)].detach() - before
                raise _Tried
        return _StepAlone(piece, before, found)

    @contextmanager
    def _inside(
        self, optimizer: Optimizer, owned: list[tuple[Piece, Tensor, Tensor]], *, is_trial: bool = False
    ) -> Iterator[None]:
        """A block in which the optimizer has the whole parameters of this rank. If it raises, states and options are undone."""
        outside, groups = optimizer.state, optimizer.param_groups
        sharded = {id(parameter.sharded) for parameter in self._logical}
        inside: Any = defaultdict(dict)
        inside.update((key, state) for key, state in outside.items() if id(key) not in sharded)
        by_parameter: dict[int, list[nn.Parameter]] = {}
        for piece, weight, grad in owned:
            plain = self._plain.setdefault(id(piece), nn.Parameter(weight.new_empty(0)))
            plain.data, plain.grad = weight, grad
            plain.requires_grad_(piece.parameter.sharded.requires_grad)
            by_parameter.setdefault(id(piece.parameter.sharded), []).append(plain)
            if state := _state_of(outside, piece):
                inside[plain] = state
        others = [one for listed in self._members for one in listed if id(one) not in sharded and one.grad is not None]
        undo = _Undo(optimizer, inside, others) if self._restorable or is_trial else None
        for group, members in zip(groups, self._members):
            group["params"] = [one for member in members for one in by_parameter.get(id(member), [])] + [
                member for member in members if id(member) not in sharded
            ]
        optimizer.state = inside
        try:
            yield
        except BaseException:
            if undo is not None:
                inside = undo.run()
            raise
        finally:
            optimizer.state = outside
            for piece, _, _ in owned:
                if state := inside.pop(self._plain[id(piece)], None):
                    _set_state(outside, piece, state)
            outside.update(inside)
            for group, members in zip(groups, self._members):
                group["params"] = list(members)
            for plain in self._plain.values():
                plain.grad, plain.data = None, plain.data.new_empty(0)

    def _list_pieces(self, optimizer: Optimizer) -> None:
        """List the pieces and choose their owners, if the optimizer's parameters are others than in the last step."""
        members = [list(group["params"]) for group in optimizer.param_groups]
        # Scalars are replicated, so every rank steps them.
        logical = [one for one in logical_parameters(p for listed in members for p in listed) if one.shape]
        self._splits.check_sharded(self._doing)
        dtypes = [one.local.dtype for one in logical]  # which a cast of the model changes
        same = len(logical) == len(self._logical) and all(map(is_, logical, self._logical)) and dtypes == self._dtypes
        self._members = members
        if same:
            return
        if self._has_stepped:
            self._check_still_sharded()
        found: dict[torch.dtype, list[Piece]] = {}
        for parameter in logical:
            found.setdefault(parameter.local.dtype, []).extend(pieces_of(parameter, self._splits.of(parameter)))
        self._logical, self._dtypes, self._plain = logical, dtypes, {}
        self._meshes = [
            _Mesh([pieces[index] for index in indices], dtype, self._cost, self._doing)
            for dtype, pieces in found.items()
            for indices in by_mesh(pieces)
        ]
        self._loaded = True

    def _check_still_sharded(self) -> None:
        """Raise StateError on all ranks if parameters that may have states on their owners are no longer sharded."""
        for parameter in self._logical:
            if not logical_parameters([current(parameter.sharded)]):
                raise StateError(
                    f"{self._doing}: parameter '{parameter.name}' is no longer sharded, and its state is on its owner only. "
                    "Save a checkpoint before undo(), and load it into a new optimizer."
                )

    def _check_states(self, optimizer: Optimizer) -> None:
        """Drop states of pieces that other ranks own. Raise StateError on all ranks if an owner lacks one. Collective."""
        told: list[str] = []
        for mesh in self._meshes:
            exchange = mesh.exchange(list(range(len(mesh.pieces))))
            owned = set(exchange.owned)
            here = torch.tensor([bool(_state_of(optimizer.state, piece)) for piece in mesh.pieces], dtype=torch.uint8)
            mine = torch.tensor([index in owned for index in range(len(mesh.pieces))], dtype=torch.uint8)
            other = torch.tensor([_is_of_another_split(optimizer.state, piece) for piece in mesh.pieces], dtype=torch.uint8)
            with exchange.call():
                found = exchange.maximum(torch.stack([here, here * mine, other]))
            for index in found[2].nonzero().flatten().tolist():
                told.append(
                    f"the states of parameter '{mesh.pieces[index].name}' are of another split. Load them with the split with "
                    "which they were saved."
                )
            for index in (found[0] > found[1]).nonzero().flatten().tolist():
                told.append(
                    f"there is a state of parameter '{mesh.pieces[index].name}', but not on its owner. Load states by "
                    "torch.distributed.checkpoint into an optimizer that has stepped once, or the state of all parameters on "
                    "all ranks, and add all parameter groups before the first step."
                )
            for index, piece in enumerate(mesh.pieces if not told else ()):
                if index not in owned:
                    _set_state(optimizer.state, piece, None)
        if told:
            raise StateError(f"{self._doing}: {told[0]}")
        self._loaded = False


def _arrived(exchange: OwnerExchange, pieces: list[Piece]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return (weight, gradient) of the pieces that this rank owns. Collective."""

    def filling(of: Callable[[ShardedParameter], Tensor]) -> Fill:
        return lambda indices, places: copy_into(places, [pieces[i].part(of(pieces[i].parameter)) for i in indices])

    weights, grads = exchange.to_owners(filling(lambda parameter: parameter.local)), exchange.to_owners(filling(_gradient))
    found = {}
    for index, weight in weights.items():
        # where the shards are: optimizers compute with offloaded parameters in host memory
        shape, device = pieces[index].whole.own_shape, pieces[index].parameter.local.device
        found[index] = weight.to(device).view(shape), grads[index].to(device).view(shape)
    return found


def _gradient(parameter: ShardedParameter) -> Tensor:
    """Return the local gradient. Raises StateError if it is distributed otherwise than the parameter."""
    grad, expected = parameter.sharded.grad, parameter.spec
    if grad is not None and grad.dtype != parameter.local.dtype:
        raise StateError(
            f"Expected the gradient of parameter '{parameter.name}' in its dtype {parameter.local.dtype}, got {grad.dtype}, "
            "which whole_view() does not support."
        )
    spec = _torch.spec_of(grad) if isinstance(grad, DTensor) else None
    if grad is None or spec is None or (spec.mesh, spec.placements) != (expected.mesh, expected.placements):
        raise StateError(
            f"Expected the gradient of parameter '{parameter.name}' on {expected.mesh} with {expected.placements}, got "
            f"{'a plain tensor' if spec is None else f'one on {spec.mesh} with {spec.placements}'}. redistribute() it first."
        )
    return to_local(grad)


def _state_of(states: Any, piece: Piece) -> Any:
    """Return the state of a piece, None if there is none. Of a split parameter, each piece has an entry by number."""
    state = states.get(piece.parameter.sharded)
    return state if piece.number is None or state is None else state.get(str(piece.number))


def _is_of_another_split(states: Any, piece: Piece) -> bool:
    """Return True if the state of a parameter has entries of pieces that it does not have."""
    state = states.get(piece.parameter.sharded) or {}
    numbered = {key for key, value in state.items() if isinstance(key, str) and key.isdigit() and isinstance(value, dict)}
    return bool(numbered if piece.number is None else state.keys() - {str(number) for number in range(piece.count)})


def _set_state(states: Any, piece: Piece, state: Any) -> None:
    """Set the state of a piece, or remove it with None."""
    key = piece.parameter.sharded
    if piece.number is None:
        states[key] = state or {}
        return
    pieces = states.setdefault(key, {})
    pieces.pop(str(piece.number), None)
    if state:
        pieces[str(piece.number)] = state


def _own_numbers(optimizer: Optimizer) -> dict[str, Any]:
    """Return the plain values among the optimizer's attributes, such as counters."""
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, (bool, int, float, str))}


def _numbers(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the plain values of options and attributes. Their changes in a step must be equal on all ranks."""
    found: dict[Any, Any] = dict(sorted(_own_numbers(optimizer).items()))
    for index, group in enumerate(optimizer.param_groups):
        plain = (key for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple)))
        found.update(((index, key), group[key]) for key in sorted(plain))
    return found


def _step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the step of the optimizer's class on whole parameters."""
    step: Any = type(optimizer).step
    # Without torch's wrapper, which runs the step hooks: `_HOOKED_STEP` runs them already, around `_step`.
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    view: _WholeView = optimizer.__dict__[_VIEW]
    closure = args[0] if args else kwargs.get("closure")
    if not callable(closure):
        return view.step(optimizer, partial(step, optimizer, *args, **kwargs))
    # Before the parameters of the step take the place of the sharded ones, which forward and backward need.
    with torch.enable_grad():
        loss = closure()

    def with_loss() -> Any:
        once = _once(loss, type(optimizer).__name__)
        return step(optimizer, once, *args[1:], **kwargs) if args else step(optimizer, **{**kwargs, "closure": once})

    return view.step(optimizer, with_loss)


def _once(loss: Any, name: str) -> Callable[[], Any]:
    """Return a closure with a known result, which may be called once."""
    results = [loss]

    def closure() -> Any:
        if not results:
            raise StateError(f"{name} calls its closure several times in a step, which whole_view() does not support.")
        return results.pop()

    return closure


# torch's wrapper runs the step hooks around `_step`, so hooks see sharded parameters. `hooked` stops torch from wrapping again.
_HOOKED_STEP = Optimizer.profile_hook_step(_step)

__all__ = ["CACHE", "has_whole_view", "splits_of", "whole_view"]
