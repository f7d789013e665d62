"""`whole_view`: steps of other libraries' optimizers on whole parameters, each on its owner (Shampoo, SOAP)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from fullshard import _torch
from fullshard.core import ShardedParameter, current_parameter, logical_parameters, user_attributes
from fullshard.errors import StateError, check_bool, some_of, warn_once
from fullshard.optim.local_steps import is_element_wise
from fullshard.optim.matrix_owners import CachedExchange
from fullshard.optim.muon import set_splits
from fullshard.optim.owner_exchange import Fill, OwnerExchange, copy_into
from fullshard.optim.owners import Cost
from fullshard.optim.pieces import Piece, Split, Splits, is_same, pieces_of, placement_error
from fullshard.optim.step_wrapper import BeforeStep, plain_attributes, refuse_copies, view_of, wrap_step

# Tolerance for the step of one parameter alone, relative to its norm: kernels over several tensors may round otherwise.
_TOLERANCE = 1e-2

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


def whole_view(
    optimizer: OptimizerT, *, split: Split | None = None, cost: Cost | None = None, restorable: bool = True
) -> OptimizerT:
    """Make an optimizer that is not element-wise step on whole parameters, each on the rank that owns it.

    For optimizers that compute with a parameter as a whole, as Shampoo, SOAP or LAMB. Each parameter has an owner. In a step
    its gradient and weight travel there, the optimizer's own `step` runs on the owner with plain Parameters, and the new
    weight travels back. The states of a parameter, factors of any shape among them, are on its owner only.

    The optimizer must compute each parameter from this parameter, its gradient, its state and the options alone. One that
    combines several raises an error as soon as a step changes its plain options differently on the ranks, or as a parameter
    steps otherwise alone than with others, which steps 1, 2, 4, 8 and so on try with one parameter of each rank, and undo.

    Inside of the step, the plain Parameters have the attributes of the sharded ones. Outside of it, `param_groups` hold the
    sharded parameters as before, so clipping, GradScaler and schedulers work unchanged. `state_dict()` has the states of the
    own parameters on each rank. torch.distributed.checkpoint saves them all, under names that do not depend on the owner, and
    loads them with another number of ranks, into an optimizer that has stepped once.

    `torch.optim.Muon` needs no call; with `split`, it computes with the pieces. A copy of an optimizer, by copy.deepcopy or
    pickle, needs a call of its own: Optimizer copies options and states only.

    Args:
        optimizer: a `torch.optim.Optimizer` whose class defines `step`. Call this after fully_shard(), and before other code
            wraps `step`, for example before a scheduler is created.
        split: the pieces of parameters that are several matrices: a number of equal pieces or their sizes along dim 0, or
            `Pieces`. Each piece is a parameter of its own inside the step.
        cost: function of a `Matrix` that returns the time of a step for it, in any unit; None for that of Newton-Schulz.
        restorable: True to copy the states of own parameters during a step. If a rank fails, then states and options are as
            before, and of the attributes of the optimizer plain values, their lists, sets and dicts, and tensors; other objects
            are not restored. False to save this memory: then no step follows one that failed until states are loaded.

    Returns:
        The same `optimizer`.

    Raises:
        ValueError: if it is not an optimizer, is element-wise (which needs no whole parameters), has states, a `whole_view` or
            a `local_view` already, keeps its parameters in attributes, has a `step` that was replaced, or if a parameter cannot
            be split like this; for Muon, if `cost` or `restorable` is given.

    Example:
        >>> optimizer = fullshard.whole_view(SOAP(model.parameters(), lr=3e-3))               # doctest: +SKIP
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"whole_view takes a torch.optim.Optimizer, got {name}. Build the optimizer and pass it.")
    check_bool("restorable", restorable)
    if cost is not None and not callable(cost):
        raise ValueError(f"cost must be a function of a Matrix, or None, got {cost!r}.")
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    splits = Splits(split, members)
    if _torch.steps_as(optimizer, Muon):
        if cost is not None or not restorable:
            raise ValueError(
                f"Expected cost=None and restorable=True for {name}, got cost={cost!r} and restorable={restorable!r}. The cost "
                "of Newton-Schulz is known, and a step writes nothing before all ranks have all results."
            )
        set_splits(optimizer, splits)
        return optimizer
    if is_element_wise(optimizer):
        raise ValueError(f"{name} is element-wise: it steps shards, faster, and needs no whole_view.")
    if view := view_of(optimizer):
        raise ValueError(f"This {name} has a {view} already. Call one of both, once.")
    known = set(map(id, members))
    for key, value in vars(optimizer).items():
        if isinstance(value, (list, tuple)) and any(id(one) in known for one in value):
            raise ValueError(
                f"{name} keeps its parameters in its attribute '{key}' as well, where whole_view cannot replace them. Use a "
                "version that reads them from param_groups, unless it combines parameters, as LBFGS does."
            )
    if any(optimizer.state.values()):
        raise ValueError(f"This {name} has states already. Call whole_view before the first step, and load states after it.")
    whole = _WholeView(optimizer, splits, cost, restorable)
    wrap_step(optimizer, whole.step, caller="whole_view")
    refuse_copies(optimizer, "a whole_view")
    optimizer.register_load_state_dict_post_hook(lambda _: whole.note_loaded())
    optimizer.register_state_dict_pre_hook(_refuse_full_state_dict)
    return optimizer


def _refuse_full_state_dict(optimizer: Optimizer) -> None:
    """Raise StateError if torch gathers a full state dict: it takes plain tensors for replicas, and would lose most states."""
    if not _torch.full_state_dict_is_requested():
        return
    every = logical_parameters(parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(one.spec.mesh.size() > 1 for one in every):
        raise StateError(
            f"get_optimizer_state_dict(full_state_dict=True): under whole_view the states of {type(optimizer).__name__} are on "
            "the owners of their parameters, and the result would have those of one rank. Call it without full_state_dict, and "
            "save the result by torch.distributed.checkpoint, which takes the states of all ranks."
        )


@dataclass(slots=True, eq=False)
class _Mesh:
    """Pieces of one dtype that are distributed over the same process groups."""

    pieces: list[Piece]
    exchange: CachedExchange
    is_checked: bool = False  # True once the states of the pieces are known to be on their owners, and on no other rank


class _WholeView:
    """The steps of one optimizer on whole parameters.

    A step, in the order of the methods below. All ranks run it, each with the parameters that it owns:

        list the pieces        if the parameters of the optimizer are others than in the step before
        check the states       after a load, or if pieces changed
        to the owners          gradients and weights travel
        alone                  sometimes one parameter first steps alone, which is undone
        step                   the optimizer's class steps on whole parameters
        confirm, write         new weights travel back; all ranks agree that this worked everywhere; then shards are written

    So a failure on any rank leaves the sharded weights as they were, and with `restorable` states, options and plain weights.
    """

    def __init__(self, optimizer: Optimizer, splits: Splits, cost: Cost | None, restorable: bool) -> None:
        self._doing = f"{type(optimizer).__name__}.step()"
        self._splits, self._cost, self._restorable = splits, cost, restorable
        self._members: list[list[Any]] = []  # the `params` of the optimizer's groups
        self._logical: list[ShardedParameter] = []
        self._dtypes: list[torch.dtype] = []  # of their shards
        self._pieces: dict[ShardedParameter, list[Piece]] = {}
        self._meshes: dict[object, _Mesh] = {}
        self._plain: dict[Piece, nn.Parameter] = {}  # the whole parameter inside the step
        self._may_have_states = False  # on this rank or on others
        self._is_loaded = False  # since the last step
        self._attempts = 0  # steps so far, with those that failed
        self._broken = ""  # why a step cannot follow, if one failed halfway

    def note_loaded(self) -> None:
        """Note that a state dict was loaded."""
        self._may_have_states = self._is_loaded = True
        self._broken = ""
        for mesh in self._meshes.values():
            mesh.is_checked = False

    def step(self, optimizer: Optimizer, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `step`, that of the optimizer's class, on whole parameters. Collective."""
        closure = args[0] if args else kwargs.get("closure")
        run: Callable[[], Any] = partial(step, *args, **kwargs)
        if callable(closure):
            # Run it now. Inside the step the whole parameters are in the place of the sharded ones, which forward and backward
            # need.
            with torch.enable_grad():
                loss = closure()

            def run() -> Any:
                results = [loss]

                def once() -> Any:
                    if not results:
                        raise StateError(
                            f"{type(optimizer).__name__} calls its closure several times in a step, which whole_view() does "
                            "not support."
                        )
                    return results.pop()

                return step(once, *args[1:], **kwargs) if args else step(**{**kwargs, "closure": once})

        if self._broken:
            raise StateError(f"{self._doing} {self._broken}")
        self._list_pieces(optimizer)
        unit = self._logical[0].unit() if self._logical else None
        with torch.no_grad(), nullcontext() if unit is None else unit.runtime.communicator.reporting_exceptions(self._doing):
            self._check_states(optimizer)
            try:
                result = self._step_owned(optimizer, run)
            except BaseException as failure:
                if not self._restorable:
                    self._broken = (
                        f"failed before ({type(failure).__name__}), and restorable=False kept no copy of the states. Load a "
                        "checkpoint's optimizer state."
                    )
                raise
        self._may_have_states = True
        return result

    # --- pieces and states ---

    def _list_pieces(self, optimizer: Optimizer) -> None:
        """List the pieces, if the optimizer's parameters are others than in the last step."""
        members = [list(group["params"]) for group in optimizer.param_groups]
        # Scalars are replicated, so every rank steps them.
        logical = [one for one in logical_parameters(p for listed in members for p in listed) if one.shape]
        self._splits.check_sharded(self._doing)
        dtypes = [one.local.dtype for one in logical]  # which a cast of the model changes
        self._members = members
        if is_same(logical, self._logical) and dtypes == self._dtypes:
            return
        for parameter in self._logical if self._may_have_states else ():
            if not logical_parameters([current_parameter(parameter.sharded)]):
                raise StateError(
                    f"{self._doing}: parameter '{parameter.name}' is no longer sharded, and its state is on its owner only. "
                    "Save a checkpoint before undo(), and load it into a new optimizer."
                )
        # Parameters that are still there keep their pieces, so that meshes of which nothing changed need no check of states:
        # ranks of other meshes would not take part in it.
        known = self._pieces
        self._pieces = {one: known.get(one) or pieces_of(one, self._splits.of(one.sharded)) for one in logical}
        found: dict[object, list[Piece]] = {}
        for parameter, pieces in self._pieces.items():
            for piece in pieces:
                found.setdefault((parameter.local.dtype, piece.mesh_key), []).append(piece)
        before, self._meshes = self._meshes, {}
        for key, pieces in found.items():
            mesh = before.get(key)
            if mesh is None or not is_same(pieces, mesh.pieces):
                dtype = pieces[0].parameter.local.dtype
                mesh = _Mesh(pieces, CachedExchange(self._doing, dtype, self._cost) if mesh is None else mesh.exchange)
            self._meshes[key] = mesh
        self._logical, self._dtypes, self._plain = logical, dtypes, {}

    def _check_states(self, optimizer: Optimizer) -> None:
        """Drop the states of pieces that other ranks own, where that is not sure yet. Collective.

        Raises StateError on all ranks of a mesh, before anything is dropped, if an owner has no state of a piece and another
        rank has one, or if states were saved with another split.
        """
        unchecked = [mesh for mesh in self._meshes.values() if not mesh.is_checked]
        kept: dict[ShardedParameter, set[int | None]] = {}  # numbers of the pieces that this rank owns
        for mesh in unchecked:
            exchange, pieces = mesh.exchange.of(mesh.pieces, mesh.pieces), mesh.pieces
            owned = set(exchange.owned)
            flags: list[list[bool]] = []
            for index, piece in enumerate(pieces):
                has = bool(_state_of(optimizer.state, piece))
                flags.append([has, has and index in owned, _is_of_another_split(optimizer.state, piece)])
            with exchange.call():
                on_any_rank = exchange.maximum(torch.tensor(flags, dtype=torch.uint8)).tolist()
            for piece, (has, owner_has, is_of_another_split) in zip(pieces, on_any_rank):
                if is_of_another_split:
                    raise StateError(
                        f"{self._doing}: the states of parameter '{piece.name}' are of another split. Load them with the split "
                        "with which they were saved."
                    )
                if has and not owner_has:
                    raise StateError(
                        f"{self._doing}: there is a state of parameter '{piece.name}', but not on its owner. Load states by "
                        "torch.distributed.checkpoint into an optimizer that has stepped once, or the state of all parameters "
                        "on all ranks, and add all parameter groups before the first step."
                    )
            if self._is_loaded and any(has for has, _, _ in on_any_rank):
                lacking = [piece for piece, (has, _, _) in zip(pieces, on_any_rank) if not has]
                if names := [piece.name for piece in lacking if piece.parameter.requires_grad]:
                    warn_once(
                        f"{self._doing}: the loaded state dict has no states of {some_of(names)}, which begin anew. The state "
                        "dict of one rank has only the states of the parameters that this rank owns. Save and load by "
                        "torch.distributed.checkpoint."
                    )
            kept.update((piece.parameter, set()) for piece in pieces)
            for index in owned:
                kept[pieces[index].parameter].add(pieces[index].number)
        for parameter, owned_numbers in kept.items():
            if None not in owned_numbers:  # this rank does not own the whole parameter
                # It keeps a state, an empty one if need be: checkpoints expect one.
                held, keys = optimizer.state.get(parameter.sharded) or {}, {str(number) for number in owned_numbers}
                optimizer.state[parameter.sharded] = {key: value for key, value in held.items() if key in keys}
        for mesh in unchecked:
            mesh.is_checked = True
        self._is_loaded = False

    # --- the step of the owners ---

    def _step_owned(self, optimizer: Optimizer, step: Callable[[], Any]) -> Any:
        """Step on the whole parameters that this rank owns, and write all shards."""
        with ExitStack() as calls:
            used: list[tuple[OwnerExchange, list[Piece]]] = []
            for mesh in self._meshes.values():
                pieces = [piece for piece in mesh.pieces if piece.parameter.sharded.grad is not None]
                if pieces:
                    exchange = mesh.exchange.of(pieces, mesh.pieces)
                    calls.enter_context(exchange.call())
                    used.append((exchange, pieces))
            owned = [(pieces[index], *each) for exchange, pieces in used for index, each in _arrived(exchange, pieces).items()]
            self._attempts += 1
            alone = None
            is_due = self._attempts & (self._attempts - 1) == 0  # a power of two
            if is_due and len(owned) > 1 and not all(exchange.is_on_one_rank for exchange, _ in used):
                alone = self._step_alone(optimizer, owned, step)
            with self._inside(optimizer, owned):
                before = _plain_values(optimizer)
                result = step()
                stepped = {piece: self._plain[piece].detach().view(piece.whole.shape) for piece, _, _ in owned}
                parts = [
                    exchange.to_shards({index: stepped[pieces[index]] for index in exchange.owned}) for exchange, pieces in used
                ]
                self._confirm(optimizer, [exchange for exchange, _ in used], before, alone)
            for (_, pieces), results in zip(used, parts):
                for piece, part in zip(pieces, results):
                    piece.part(piece.parameter.local).copy_(part)
                    # Every parameter has a state, as torch.distributed.checkpoint expects: an empty one if others own it.
                    optimizer.state.setdefault(piece.parameter.sharded, {})
        return result

    def _step_alone(
        self, optimizer: Optimizer, owned: list[tuple[Piece, Tensor, Tensor]], step: Callable[[], Any]
    ) -> tuple[Piece, Tensor, Tensor]:
        """Step one parameter of this rank without the other sharded ones, undo that, and return it, its weight and change."""
        places = {id(member): place for place, member in enumerate(m for listed in self._members for m in listed)}
        # The first one, and below with the same state of the generators, so that it draws the same random numbers as with the
        # others.
        piece, weight, grad = min(owned, key=lambda one: places[id(one[0].parameter.sharded)])
        before = weight.clone()
        with (
            torch.random.fork_rng([weight.device] if weight.device.type == "cuda" else []),
            self._inside(optimizer, [(piece, weight.clone(), grad.clone())], is_trial=True),
        ):
            step()
            change = self._plain[piece].detach() - before
        return piece, before, change

    @contextmanager
    def _inside(
        self, optimizer: Optimizer, owned: list[tuple[Piece, Tensor, Tensor]], *, is_trial: bool = False
    ) -> Iterator[None]:
        """A block in which the optimizer has the whole parameters of this rank in the place of the sharded ones.

        If the block raises and the optimizer is restorable, and always after a trial, `BeforeStep` restores what was before.
        """
        outside, groups = optimizer.state, optimizer.param_groups
        sharded = {id(parameter.sharded) for parameter in self._logical}
        inside: Any = defaultdict(dict)
        inside.update((key, state) for key, state in outside.items() if id(key) not in sharded)
        by_parameter: dict[int, list[nn.Parameter]] = {}
        for piece, weight, grad in owned:
            plain = self._plain.setdefault(piece, nn.Parameter(weight.new_empty(0)))
            plain.data, plain.grad = weight, grad
            plain.requires_grad_(piece.parameter.sharded.requires_grad)
            plain.__dict__.update(user_attributes(piece.parameter.sharded))
            by_parameter.setdefault(id(piece.parameter.sharded), []).append(plain)
            if state := _state_of(outside, piece):
                inside[plain] = state
        others = [one for listed in self._members for one in listed if id(one) not in sharded and one.grad is not None]
        before = BeforeStep(optimizer, inside, others) if self._restorable or is_trial else None
        names = [group.get("param_names") for group in groups]
        for group, members, listed in zip(groups, self._members, names):
            named = [*zip(members, listed or repeat(None))]
            chosen = [(one, name) for member, name in named for one in by_parameter.get(id(member), [])]
            chosen += [(member, name) for member, name in named if id(member) not in sharded]
            group["params"] = [one for one, _ in chosen]
            if listed is not None:
                group["param_names"] = [name for _, name in chosen]
        optimizer.state = inside
        is_kept = False
        try:
            yield
            is_kept = not is_trial
        finally:
            if before is not None and not is_kept:
                inside = before.restore()
            optimizer.state = outside
            for piece, _, _ in owned:
                if state := inside.pop(self._plain[piece], None):
                    _set_state(outside, piece, state)
            outside.update(inside)
            for group, members, listed in zip(groups, self._members, names):
                group["params"] = list(members)
                if listed is not None:
                    group["param_names"] = listed
            for plain in self._plain.values():
                plain.grad, plain.data = None, plain.data.new_empty(0)

    def _confirm(
        self,
        optimizer: Optimizer,
        exchanges: Sequence[OwnerExchange],
        before: dict[Any, Any],
        alone: tuple[Piece, Tensor, Tensor] | None,
    ) -> None:
        """Wait until all ranks have stepped. Raise StateError on all of them if the optimizer combines parameters."""
        changed = repr([(k, value) for k, value in _plain_values(optimizer).items() if k not in before or before[k] != value])
        combines = False
        if alone is not None:
            piece, weight, change = alone
            change_with_others = self._plain[piece].detach() - weight
            combines = bool((change - change_with_others).norm() > _TOLERANCE * change_with_others.norm())  # False for NaN
        if combines:
            changed += f" and rank {dist.get_rank()}"  # equal on no other rank, so that all of them raise
        confirmed = [exchange.confirm(changed.encode()) for exchange in exchanges]
        if not all(confirmed) or combines:
            raise StateError(
                f"{self._doing}: the options of {type(optimizer).__name__} differ between ranks after the step, or a parameter "
                "alone would have stepped otherwise. It combines several parameters, of which each rank has its own; "
                "whole_view() is for optimizers that compute each parameter alone. Turn off what combines them, as clipping by "
                "the norm of all gradients, and do it before the step."
            )


# --- messages ---


def _arrived(exchange: OwnerExchange, pieces: list[Piece]) -> dict[int, tuple[Tensor, Tensor]]:
    """Return (weight, gradient) of the pieces that this rank owns. Collective."""

    def fill_with(of: Callable[[ShardedParameter], Tensor]) -> Fill:
        return lambda indices, places: copy_into(places, [pieces[i].part(of(pieces[i].parameter)) for i in indices])

    weights, grads = exchange.to_owners(fill_with(lambda parameter: parameter.local)), exchange.to_owners(fill_with(_gradient))
    found = {}
    for index, weight in weights.items():
        # On the device of the shard: with CPU offload that is host memory, where the optimizer computes.
        shape, device = pieces[index].whole.own_shape, pieces[index].parameter.local.device
        found[index] = weight.to(device).view(shape), grads[index].to(device).view(shape)
    return found


def _gradient(parameter: ShardedParameter) -> Tensor:
    """Return the local gradient. Raises StateError if it is distributed otherwise than the parameter."""
    grad = parameter.sharded.grad
    assert grad is not None  # `_step_owned` chose the parameters that have one
    if grad.dtype != parameter.local.dtype:
        raise StateError(
            f"Expected the gradient of parameter '{parameter.name}' in its dtype {parameter.local.dtype}, got {grad.dtype}, "
            "which whole_view() does not support."
        )
    if unlike := placement_error(_torch.specs_of([grad])[0], parameter):
        raise StateError(f"The gradient of parameter '{parameter.name}' is {unlike}. redistribute() it first.")
    return _torch.local_part(grad)


# --- states: the key is the sharded parameter; the state of a split one has an entry per piece, by its number ---


def _state_of(states: Any, piece: Piece) -> Any:
    """Return the state of a piece, None if there is none."""
    state = states.get(piece.parameter.sharded)
    return state if piece.number is None or state is None else state.get(str(piece.number))


def _set_state(states: Any, piece: Piece, state: Any) -> None:
    """Set the state of a piece."""
    if piece.number is None:
        states[piece.parameter.sharded] = state
    else:
        states.setdefault(piece.parameter.sharded, {})[str(piece.number)] = state


def _is_of_another_split(states: Any, piece: Piece) -> bool:
    """Return True if the state of the parameter was saved with another split."""
    state = states.get(piece.parameter.sharded) or {}
    numbered = {key for key, value in state.items() if isinstance(key, str) and key.isdigit() and isinstance(value, dict)}
    return bool(numbered if piece.number is None else state.keys() - {str(number) for number in range(piece.count)})


# --- options ---


def _plain_values(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the plain values of options and attributes. Their changes in a step must be equal on all ranks."""
    found: dict[Any, Any] = dict(sorted(plain_attributes(optimizer).items()))
    for index, group in enumerate(optimizer.param_groups):
        plain = (key for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple)))
        found.update(((index, key), group[key]) for key in sorted(plain))
    return found
