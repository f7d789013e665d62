"""Steps of `torch.optim.Muon` on sharded matrices: element-wise on shards, Newton-Schulz on the owners of whole matrices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, optim

from fullshard import _torch
from fullshard.core import ShardedParameter, back_references
from fullshard.errors import warn_once
from fullshard.optim.matrix_owners import Exchanges
from fullshard.optim.pieces import Piece, Splits, pieces_of, placement_error
from fullshard.optim.step_wrapper import refuse_copies

WIRE = torch.bfloat16  # Newton-Schulz casts to it first, so messages in it change no bit of the result

RUN_NBYTES = 16 << 20  # of gradients whose updates are computed together, with two temporaries of this size

_SPLITS = "_fullshard_splits"  # attribute of a Muon: how its matrices are split


def set_splits(optimizer: optim.Optimizer, splits: Splits) -> None:
    """Set how the matrices of a Muon are split, from its next step on."""
    optimizer.__dict__[_SPLITS] = splits
    refuse_copies(optimizer, "a split of its matrices")


def splits_of(optimizer: optim.Optimizer) -> Splits | None:
    """Return how the matrices of a Muon are split; None if each is one."""
    return optimizer.__dict__.get(_SPLITS)


@dataclass(slots=True, eq=False)
class _Member:
    """One matrix in a step: a parameter, or a piece of one."""

    piece: Piece
    local: Tensor  # its shard
    grad: Tensor  # the shard of its gradient
    momentum: Tensor  # the shard of its momentum buffer
    options: dict[str, Any]  # of its parameter group, in this step


class MuonStep:
    """Replacement of Muon's `_init_group`, the method that collects the tensors of a step in lists.

    All tensors are taken out of the lists, so that Muon's `step` itself does nothing. At the end of the step sharded matrices
    are computed together: messages to the owners and back, and then all writes. So a step that raises before the writes, on any
    rank, has changed no weight and no momentum on any rank. Behind the writes torch's own function computes the rest: plain
    matrices; those that tensor parallelism shards unevenly or over several axes; and those whose gradient or momentum is
    distributed otherwise than the parameter.

        momentum = lerp(momentum, gradient, 1 - mu)
        update = lerp(gradient, momentum, mu)   on the shards, in bfloat16 to the owners; momentum itself without nesterov
        update = Newton-Schulz(update)          on the owners, in bfloat16 back to the shards
        weight *= 1 - lr * weight_decay; weight -= adjusted lr * update

    Source: Jordan et al. 2024, Muon (kellerjordan.github.io/posts/muon); `torch.optim.Muon` (torch 2.13).
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._splits: Splits | None = None
        self._members: list[_Member] = []  # of the running step
        self._rest: list[tuple[dict[str, Any], tuple[list[Tensor], ...], bool]] = []  # options, lists, and if any is complex
        self._new: list[Tensor] = []  # parameters whose momentum buffer was created in the running step
        self._exchanges = Exchanges(f"{type(optimizer).__name__}.step()", WIRE)
        # Of each parameter; None for one that torch's function computes.
        self._pieces: dict[ShardedParameter, list[Piece] | None] = {}

    def keep_only(self, parameters: Iterable[ShardedParameter]) -> None:
        """Forget the pieces of other parameters."""
        self._pieces = {one: self._pieces[one] for one in parameters if one in self._pieces}

    def begin_step(self, optimizer: optim.Optimizer) -> None:
        """Clear what is left of the step before, which may have raised."""
        splits = splits_of(optimizer)
        if splits is not self._splits:  # whole_view() was called since
            self._splits, self._pieces = splits, {}
        self._clear()

    def _clear(self) -> None:
        self._members, self._rest, self._new = [], [], []

    # A compiled step must not trace messages, nor leave them out the second time.
    @_torch.not_traced
    def __call__(self, group: dict[str, Any], *lists: Any) -> Any:
        """Keep what `_init_group` lists until the end of the step, and leave the lists empty."""
        if _torch.is_tracing():
            _torch.run_optimizer_uncompiled()
        optimizer: Any = self._optimizer()
        self._new += [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        result = _torch.list_tensors(optimizer, group, *lists)
        # One object for all matrices of the group, by which `runs` finds those that are computed together. A copy, since Muon's
        # step may be called again, by a scheduler with other options, before the end of this one.
        options, rest = dict(group), list[tuple[Tensor, ...]]()
        # Specs and shards by list, since an optimizer lists hundreds of matrices.
        specs, shards = zip(*map(_torch.specs_of, lists)), zip(*map(_torch.locals_of, lists))
        for tensors, reference, specs_of_one, (local, grad, momentum) in zip(
            zip(*lists), back_references(lists[0]), specs, shards
        ):
            parameter = None if reference is None else reference()
            pieces = None if parameter is None else self._pieces_for(parameter, specs_of_one)
            if pieces is None:
                rest.append(tensors)
            else:
                self._members += [_Member(one, one.part(local), one.part(grad), one.part(momentum), options) for one in pieces]
        if rest:
            self._rest.append((options, tuple(map(list, zip(*rest))), bool(result)))
        for listed in lists:
            listed.clear()
        return result

    @_torch.not_traced
    def end_step(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Compute the step of the noted matrices. Collective."""
        members, rest, new = self._members, self._rest, self._new
        self._clear()

        def newton_schulz(indices: Sequence[int], wholes: list[Tensor]) -> list[Tensor]:
            options = members[indices[0]].options
            return [_torch.newton_schulz(wholes[0], options["ns_coefficients"], options["ns_steps"], options["eps"])]

        def fill(indices: Sequence[int], places: Sequence[Tensor]) -> None:
            """Compute the updates of shards into a message, some MiB at a time, since each operator costs a launch."""
            for part in runs(indices, lambda index: id(members[index].options), lambda index: members[index].grad.nbytes):
                mine = [members[indices[number]] for number in part]
                grads, momenta = [one.grad for one in mine], [one.momentum for one in mine]
                torch._foreach_copy_([places[number] for number in part], updates_of(grads, momenta, mine[0].options))

        pieces = [member.piece for member in members]
        with torch.no_grad():
            try:
                updates = self._exchanges.run(pieces, fill, newton_schulz)
            except BaseException:
                for parameter in new:
                    optimizer.state.pop(parameter, None)
                raise
            for part in runs(range(len(members)), lambda index: id(members[index].options)):
                mine = [members[number] for number in part]
                weights, grads, momenta = ([getattr(one, key) for one in mine] for key in ("local", "grad", "momentum"))
                shapes = [one.piece.whole.shape for one in mine]
                arrived, options = [updates[number] for number in part], mine[0].options
                # A learning rate in a tensor may be on another device, which foreach operations refuse.
                foreach = not isinstance(options["lr"], Tensor) and all(weight.is_cuda for weight in weights)
                write(weights, grads, momenta, arrived, shapes, options, foreach=foreach)
            for options, lists, has_complex in rest:
                _torch.step_muon(lists, options, has_complex=has_complex)

    def _pieces_for(self, parameter: ShardedParameter, specs: Iterable[Any]) -> list[Piece] | None:
        """Return the pieces of a sharded matrix; None if torch computes it. `specs`: of it, its gradient and momentum."""
        if parameter.unit() is None:
            return None
        if parameter not in self._pieces:
            how = None if self._splits is None else self._splits.of(parameter.sharded)
            try:
                self._pieces[parameter] = pieces_of(parameter, how)
            except ValueError as reason:  # tensor parallelism that owners do not support, and DTensor does
                if how is not None:
                    raise
                self._warn_of_dtensor(str(reason))
                self._pieces[parameter] = None
        pieces = self._pieces[parameter]
        if pieces is not None and any(placement_error(spec, parameter) for spec in specs):
            self._warn_of_dtensor(f"Gradient or momentum of parameter '{parameter.name}' is distributed otherwise.")
            return None
        return pieces

    def _warn_of_dtensor(self, reason: str) -> None:
        name = type(self._optimizer()).__name__
        warn_once(f"{reason} {name} computes with it by DTensor, on every rank: slower, but right.")


def runs(
    indices: Sequence[int], key: Callable[[int], object], nbytes: Callable[[int], int] | None = None
) -> Iterator[list[int]]:
    """Yield runs of consecutive positions in `indices` with equal keys. Several have at most `RUN_NBYTES` together."""
    run: list[int] = []
    last, room = object(), 0
    for number, index in enumerate(indices):
        size = 0 if nbytes is None else nbytes(index)
        if run and (key(index) != last or size > room):
            yield run
            run = []
        if not run:
            last, room = key(index), RUN_NBYTES
        room -= size
        run.append(number)
    if run:
        yield run


def updates_of(grads: list[Tensor], momenta: list[Tensor], options: Mapping[str, Any]) -> list[Tensor]:
    """Return this rank's parts of updates before they are orthogonalized, (shard shape) each."""
    updates = torch._foreach_lerp(momenta, grads, 1 - options["momentum"])
    return list(torch._foreach_lerp(grads, updates, options["momentum"]) if options["nesterov"] else updates)


def write(
    weights: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    updates: list[Tensor],
    shapes: Sequence[Sequence[int]],  # of the whole matrices
    options: Mapping[str, Any],
    *,
    foreach: bool,  # few kernels, which the host launches while the device waits; on the CPU they round bfloat16 otherwise
) -> None:
    """Write the shards of momenta and weights, in the order of the reference."""
    lr = _torch.scalar_of(options["lr"])
    # `updates_of` has computed it already, in temporaries: nothing may be written before all ranks have all results.
    torch._foreach_lerp_(momenta, grads, 1 - options["momentum"])
    decay = 1 - lr * options["weight_decay"]
    if foreach:
        torch._foreach_mul_(weights, decay)
    for weight, update, shape in zip(weights, updates, shapes):
        if not foreach:
            weight.mul_(decay)
            rows, columns = shape
            transposed = rows > columns and options["ns_steps"] > 0  # as Newton-Schulz returns it
            update = (_column_major(update) if transposed else update).to(weight.device)
        weight.add_(update, alpha=-_torch.adjusted_lr(lr, options["adjust_lr_fn"], torch.Size(shape)))


def _column_major(update: Tensor) -> Tensor:
    """Return a copy whose columns are contiguous, as Newton-Schulz returns tall matrices.

    On the CPU, an addition in bfloat16 rounds otherwise if the update has other strides than the weight.
    """
    made = update.new_empty(update.shape[1], update.shape[0] + 1)[:, :-1].t()  # a single row would count as contiguous
    return made.copy_(update)
