"""Option classes, and the values that they resolve to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from fullshard import _torch
from fullshard.errors import check_bool, check_float_dtype, check_int

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class GradDtype:
    """The `Tensor.grad_dtype` of a parameter.

    explicit  dtype       dtype of `.grad`
    False     (ignored)   dtype of the parameter, also after the parameter is cast
    True      a dtype     this dtype, also after the parameter is cast
    True      None        dtype in which the gradient was computed and reduced
    """

    explicit: bool = False
    dtype: torch.dtype | None = None


UNSET_GRAD_DTYPE = GradDtype()
"""The `grad_dtype` of a parameter whose `grad_dtype` was never set."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a parameter group, one for each use, and what is cast between them.

    A gradient passes through up to four dtypes. The casts to each of them are in one place, which takes the dtype from here:

        property   gradients in it                      cast to it by
        compute    of one backward                      autograd; not at all if `casts_gradients`
        kept       of backwards without communication   `GroupGradients`, in the sum
        reduce     in messages, and sums over ranks     `Reduction`, in the copy into messages; no cast if `reduces_as_is`
        reduced    in `.grad`                           `Reduction`, in the copy of the sum; no cast if equal to `reduce`

    So a new option for one of these dtypes changes only this class and the policy that resolves to it (and `of_fsdp2`, if FSDP2
    differs), but neither the casts nor the predictions. All fields are part of each group's fingerprint, so ranks that disagree
    raise an error.
    """

    storage: torch.dtype  # of the shards
    compute: torch.dtype  # of the unsharded parameters
    reduce: torch.dtype  # of gradient reductions
    grad: torch.dtype | None  # of `.grad`; None keeps the dtype of the reduction
    accumulate: torch.dtype | None = None  # of kept gradients; None follows `reduce`

    @property
    def casts_gradients(self) -> bool:
        """True if gradients are cast when kept or reduced, so autograd must leave them in the dtype in which it computed them.

        `.grad` of the unsharded parameters may have any dtype then. Before torch 2.15 this is False unless a `grad_dtype` other
        than the storage dtype was set: as under FSDP2, autograd casts gradients to the compute dtype first.
        """
        autograd_may_leave_them = _torch.REDUCES_IN_GRAD_DTYPE or self.grad != self.storage
        return autograd_may_leave_them and any(dtype != self.compute for dtype in (self.reduce, self.kept, self.grad))

    @property
    def kept(self) -> torch.dtype:
        """The dtype in which backwards without gradient sync sum the gradients that they keep on this rank."""
        return self.reduce if self.accumulate is None else self.accumulate

    @property
    def reduces_as_is(self) -> bool:
        """True if gradients have the dtype of the reduction already, both those of one backward and kept ones."""
        return self.compute == self.reduce == self.kept

    @property
    def reduced(self) -> torch.dtype:
        """The dtype of reduced gradients."""
        return self.reduce if self.grad is None else self.grad

    @property
    def of_fsdp2(self) -> Dtypes:
        """The dtypes under torch's FSDP2, for comparison: FSDP2 sums kept gradients in the dtype of the reduction."""
        return replace(self, accumulate=self.reduce)


@dataclass(frozen=True)
class StateSharding:
    """Which mesh dims shard each kind of state of a unit: the levels of ZeRO, for one unit or for a whole model.

    - `ZERO3` (the default) shards everything: two all-gathers and one reduce-scatter per microbatch.
    - `ZERO2` keeps the parameters unsharded between steps: one all-gather per step, one reduce-scatter per microbatch.
    - `ZERO1` also sums gradients unsharded on each rank between microbatches: one all-gather and one reduce-scatter per step.

    Under every level `model.parameters()` and the optimizer have DTensors sharded over the mesh. `ZERO2` and `ZERO1` keep the
    unsharded parameters in the compute dtype, through backward and the optimizer's step, until the shards are written. The
    next outermost forward then all-gathers them anew, once. A step that a `GradScaler` skips causes no all-gather, unless the
    optimizer is fused: the scaler calls the step of a fused optimizer in any case.

    `ZERO1` reduces in the backward that ends the step. Mark all other backwards: run them inside of `model.accumulate()`, or
    after `model.set_is_last_backward(False)`. If you cannot know which is the last, call `finalize_backward()` to end the step.
    Without a mark each backward ends a step, and reduces.

    On a mesh with replicas (HSDP), "sharded" means sharded over the shard dim and replicated over the other. There is one more
    level for such a mesh:

    - `HFSDP` shards the parameters that the optimizer sees, its states and `.grad` over all ranks. In addition each rank keeps
      its shard of the hybrid mesh in the compute dtype, which an all-gather over the replicas fills once per step. Forward and
      backward all-gather this shard over the shard dim. Gradients are reduce-scattered over the shard dim per microbatch, and
      over the replicas in the backward that ends the step; mark the other backwards as under `ZERO1`. A parameter with so few
      rows that most of its shards would be padding is sharded over the shard dim only, as on any hybrid mesh.

    Args:
        parameters: roles of the mesh dims that shard the parameters between steps: `("shard",)`, or `()` to keep them
            unsharded.
        gradients: roles of the mesh dims that shard the gradients between microbatches: `("shard",)`, the same as `optimizer`,
            or `()` to sum unsharded gradients.
        optimizer: roles of the mesh dims that shard the optimizer's states, and the parameters and gradients that it sees:
            `("shard",)`, or on a hybrid mesh `("replicate", "shard")`.

    Raises:
        ValueError: for other roles, if a state is sharded over fewer mesh dims than the state before it, or for unsharded
            parameters with optimizer states that are sharded over both dims.

    Example:
        >>> StateSharding(parameters=()) == ZERO2
        True
        >>> fully_shard(model, states=ZERO2)                                                  # doctest: +SKIP

    Source: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), section 5.
    """

    parameters: tuple[str, ...] = ("shard",)
    gradients: tuple[str, ...] = ("shard",)
    optimizer: tuple[str, ...] = ("shard",)

    def __post_init__(self) -> None:
        both = ("replicate", "shard")
        if self.optimizer not in (("shard",), both):
            raise ValueError(
                f'Expected ("shard",) or {both} as optimizer= of StateSharding, got {self.optimizer!r}. To replicate optimizer '
                "states, use a mesh whose shard dim has size 1."
            )
        if self.parameters not in ((), ("shard",)):
            raise ValueError(f'Expected ("shard",) or () as parameters= of StateSharding, got {self.parameters!r}.')
        if self.gradients not in ((), ("shard",), self.optimizer):
            expected = ", ".join(map(str, dict.fromkeys((("shard",), self.optimizer))))
            raise ValueError(
                f"Expected {expected} or () as gradients= of StateSharding, which are sharded at most as the optimizer's "
                f"states ({self.optimizer}), got {self.gradients!r}."
            )
        if self.parameters and not self.gradients:
            raise ValueError(
                "Expected gradients that are sharded as the parameters are, or more, got StateSharding(parameters="
                f"{self.parameters}, gradients=()). Keep the parameters unsharded as well (ZERO1), or shard both (ZERO3)."
            )
        if self.shards_over_replicas and not self.parameters:
            raise ValueError(
                f'Expected parameters=("shard",) with optimizer={both}, got (). To keep parameters unsharded between steps and '
                "shard the optimizer's states over all ranks, use ZERO1 or ZERO2 on a mesh of one dim."
            )

    @property
    def keeps_parameters(self) -> bool:
        """True if parameters stay unsharded between steps."""
        return not self.parameters

    @property
    def keeps_gradients(self) -> bool:
        """True if gradients are summed unsharded between microbatches."""
        return not self.gradients

    @property
    def shards_over_replicas(self) -> bool:
        """True if the optimizer's states are sharded over the replicas of a hybrid mesh, too."""
        return "replicate" in self.optimizer

    @property
    def sums_over_shards(self) -> bool:
        """True if gradients are reduced over shards only, until the backward that ends the step."""
        return self.shards_over_replicas and self.gradients == ("shard",)

    def __str__(self) -> str:
        found = next((name for name, preset in PRESETS.items() if preset == self), None)
        return found or f"StateSharding({self.parameters}, {self.gradients}, {self.optimizer})"


ZERO3 = StateSharding()
"""Everything is sharded: the least memory. The default."""

ZERO2 = StateSharding(parameters=())
"""Unsharded parameters are kept between steps."""

ZERO1 = StateSharding(parameters=(), gradients=())
"""Unsharded parameters are kept between steps, and unsharded gradients between microbatches."""

HFSDP = StateSharding(optimizer=("replicate", "shard"))
"""On a hybrid mesh: optimizer states are sharded over all ranks, parameters for computing over the shard dim."""

PRESETS = {"ZERO1": ZERO1, "ZERO2": ZERO2, "ZERO3": ZERO3, "HFSDP": HFSDP}
"""The levels by name."""


_ONLY_HERE = {"only_here": True}  # metadata of a policy's field that FSDP2's class of the same name does not have


def fields_only_here(policy: Any) -> list[str]:
    """Return the names of fields that were set on a policy, and that FSDP2's class of the same name does not have."""
    return [one.name for one in fields(policy) if one.metadata.get("only_here") and getattr(policy, one.name) != one.default]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes in which a unit computes and communicates.

    Fields and meaning are those of FSDP2's class of this name. Fields that FSDP2 lacks (`_ONLY_HERE`) come last.

    `.grad` has the parameter's `grad_dtype`, by default its storage dtype. Integer, boolean and complex parameters are never
    cast.

    Args:
        param_dtype: dtype of the unsharded parameters, and so of forward and backward; None keeps the storage dtype.
        reduce_dtype: dtype in which gradients are reduced. None follows the installed torch: the dtype of `.grad` from 2.15 on;
            before, the `grad_dtype` if one was set on the parameter, else the compute dtype.
        output_dtype: dtype to cast floating-point outputs of the unit's forward to; None leaves them unchanged.
        cast_forward_inputs: cast floating-point inputs of the unit's forward to `param_dtype`.
        param_dtype_override_fn: called once with each parameter, in `fully_shard`. To all-gather a parameter in its own dtype,
            return that dtype; otherwise return `param_dtype` or None. Inputs are cast to `param_dtype` in any case.
        accumulate_dtype: dtype in which backwards without communication (`model.accumulate()`) sum the gradients that they keep
            on each rank; the sum is cast to the reduce dtype when it is reduced. None is the reduce dtype. With another dtype
            every reduction copies large gradients, to cast them. Units of `shard_model(full_precision=)` have neither this
            dtype nor a `reduce_dtype`.

    Raises:
        ValueError: if a dtype is not a floating-point torch.dtype, or the override is not callable.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).resolve(torch.float32)
        Dtypes(storage=torch.float32, compute=torch.bfloat16, reduce=torch.float32, grad=torch.float32, accumulate=None)

    Source: Micikevicius et al. 2018 (arXiv 1710.03740); `torch.distributed.fsdp.MixedPrecisionPolicy` (torch 2.15).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[torch.nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    accumulate_dtype: torch.dtype | None = field(default=None, kw_only=True, metadata=_ONLY_HERE)

    def __post_init__(self) -> None:
        casts = check_bool("MixedPrecisionPolicy.cast_forward_inputs", self.cast_forward_inputs)
        object.__setattr__(self, "cast_forward_inputs", casts)
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise ValueError(f"MixedPrecisionPolicy.param_dtype_override_fn must be callable or None, got {override!r}.")
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "accumulate_dtype"):
            dtype = getattr(self, name)
            if name == "accumulate_dtype" and isinstance(dtype, torch.dtype) and dtype.itemsize < 2:
                raise ValueError(
                    f"MixedPrecisionPolicy.accumulate_dtype must be a dtype that torch can add in, got {dtype}. Pass one of at "
                    "least 16 bits."
                )
            check_float_dtype(f"MixedPrecisionPolicy.{name}", dtype, optional=True)

    def resolve(self, storage: torch.dtype, grad_dtype: GradDtype = UNSET_GRAD_DTYPE, *, keeps_dtype: bool = False) -> Dtypes:
        """Resolve the dtypes of parameters that are stored in `storage`.

        Args:
            storage: dtype of the shards.
            grad_dtype: the `grad_dtype` of the parameters.
            keeps_dtype: all-gather the parameters in their own dtype, as `param_dtype_override_fn` chose.

        Returns:
            The dtypes; only `grad` and `accumulate` may be None.
        """
        if not storage.is_floating_point:
            return Dtypes(storage, storage, storage, storage)
        compute = storage if keeps_dtype else self.param_dtype or storage
        grad = grad_dtype.dtype if grad_dtype.explicit else storage
        reduce = self.reduce_dtype
        if reduce is None:
            follows = grad_dtype.explicit or _torch.REDUCES_IN_GRAD_DTYPE
            reduce = grad if follows and grad is not None else compute
        return Dtypes(storage, compute, reduce, grad, self.accumulate_dtype)

    def keeps_dtype_of(self, parameter: torch.nn.Parameter, *, name: str) -> bool:
        """Call `param_dtype_override_fn` to decide if a parameter is all-gathered in its own dtype.

        Args:
            parameter: the parameter before it is sharded.
            name: qualified name of the parameter, for the error text.

        Returns:
            True if the dtype of the parameter takes precedence over `param_dtype`.

        Raises:
            ValueError: if the function returns a third dtype.
        """
        if self.param_dtype_override_fn is None:
            return False
        chosen = self.param_dtype_override_fn(parameter)
        if chosen not in (None, self.param_dtype, parameter.dtype):
            raise ValueError(
                f"param_dtype_override_fn of parameter '{name}': expected None, {self.param_dtype} (param_dtype) or "
                f"{parameter.dtype} (its own), got {chosen!r}. The parameter cannot be all-gathered in another dtype"
            )
        return chosen is not None and chosen == parameter.dtype and chosen != self.param_dtype

    def without_override(self) -> MixedPrecisionPolicy:
        """Return the policy without `param_dtype_override_fn`, for parameters that it was called with already.

        Returns:
            A policy with equal dtypes.
        """
        return self if self.param_dtype_override_fn is None else replace(self, param_dtype_override_fn=None)

    def for_planning(self) -> MixedPrecisionPolicy:
        """Return the policy for a plan, which has no parameters to pass to `param_dtype_override_fn`.

        Returns:
            The policy itself.

        Raises:
            ValueError: if the policy has a `param_dtype_override_fn`.
        """
        if self.param_dtype_override_fn is not None:
            raise ValueError(
                "a plan has names and sizes of parameters only, and param_dtype_override_fn needs the parameters: expected "
                "mp_policy without it. Give units of such parameters a policy of their own (PlannedUnit(options=...))"
            )
        return self

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype to cast floating-point inputs to; None if inputs are not cast."""
        return self.param_dtype if self.cast_forward_inputs else None


def resolve_mp(policy: Any) -> MixedPrecisionPolicy:
    """Convert torch's policy of this name to ours, and return ours unchanged.

    Raise ValueError for any other type, and if torch's policy sets a field that ours does not have.
    """
    return _resolve(policy, MixedPrecisionPolicy, expected="mp_policy must be a MixedPrecisionPolicy")


def resolve_offload(policy: Any) -> OffloadPolicy:
    """Convert torch's offload policy to ours, and return ours unchanged. Raise ValueError as `resolve_mp` does."""
    return _resolve(policy, OffloadPolicy, CPUOffloadPolicy, expected="offload_policy must be an OffloadPolicy")


def _resolve(policy: Any, *kinds: type[Any], expected: str) -> Any:
    """Return a policy of one of our classes `kinds`, or torch's policy of the same name as ours.

    Raise ValueError for a further field that is not at its default: a newer torch may have options that fullshard ignores.
    """
    if isinstance(policy, kinds):
        return policy
    theirs = type(policy)
    kind = next((kind for kind in kinds if kind.__name__ == theirs.__name__), None)
    if kind is None or not theirs.__module__.startswith("torch.distributed."):
        raise ValueError(f"{expected}, got {theirs.__name__}.")
    known = {one.name for one in fields(kind)}
    values: dict[str, Any] = {}
    for one in fields(policy):
        value = getattr(policy, one.name)
        if one.name in known:
            values[one.name] = value
            continue
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if value is not default and value != default:
            raise ValueError(
                f"torch's {theirs.__name__} has {one.name}={value!r}, which fullshard does not know: expected its "
                f"default, {default!r}. Leave it out, or use a fullshard that knows it"
            )
    return kind(**values)


@dataclass(frozen=True)
class OffloadPolicy:
    """The device on which shards are stored. This base class stores them on the device of the mesh.

    Source: `torch.distributed.fsdp.OffloadPolicy`.
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards and gradients, and so optimizer states, are stored in host memory.

    Each all-gather begins with one copy of a group's flat shard to the device. Each reduction ends with one copy of its flat
    gradient to the host. Both copies overlap with compute: copies to the device have a stream of their own, copies to the
    host run on the stream of the reduction.

    Args:
        pin_memory: page-lock the host memory, so that copies do not block the host. Ignored, with one warning, if there is no
            accelerator to copy to.

    Source: Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840); `torch.distributed.fsdp.CPUOffloadPolicy`.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "pin_memory", check_bool("CPUOffloadPolicy.pin_memory", self.pin_memory))


DIRECT_MIN_BYTES = 256 << 10
"""Minimum bytes per rank of a direct all-gather: measured for gloo (docs/performance.md), estimated for nccl."""


@dataclass(frozen=True)
class CommPolicy:
    """Options of collectives: direct and packed parameters, prefetch, and transport.

    Args:
        direct_min_bytes: minimum bytes of a parameter's chunk per rank, in the smaller of its storage and compute dtypes, for a
            direct all-gather, which needs no copy. Smaller parameters share one packed collective. `float("inf")` packs
            everything; 0 packs only parameters that cannot be all-gathered directly. None uses the value for the backend
            (measured for gloo, estimated for nccl) and adds two rules for parameters of at least 4 KiB per rank: of those
            that may be direct, the 16 largest are direct if they have at least 8 MiB over all ranks; others of at least 1 MiB
            are direct while the packed parameters exceed both 32 MiB and a tenth of the group.
        reductions_in_flight: number of groups whose gradients may be in flight before backward waits for the oldest, at
            least 1. The limit counts the reductions of all units of a thread on a device (with the same `lanes`), and must be
            equal on all ranks if hooks on parameters start collectives.
        prefetch_bytes: while this unit computes, prefetch the units that the schedule expects next, as long as all prefetched
            units together have at most this many bytes of unsharded parameters, padding included. None prefetches exactly one
            unit, 0 none.
        collectives: called with each process group that a unit uses (shards; and, if there are any, replicas, separate
            reductions, the smaller group of an int reshard, and under `HFSDP` the group of all ranks). Returns the
            `Collectives` to use instead of torch's.
        lanes: called with the device, returns a new `Lane`; None means CUDA streams or asynchronous CPU work.

    Raises:
        ValueError: if a number has the wrong type or is below its minimum.

    Example:
        >>> fully_shard(block, comm_policy=CommPolicy(prefetch_bytes=512 * 2**20))            # doctest: +SKIP
    """

    direct_min_bytes: float | None = None
    reductions_in_flight: int = 1
    prefetch_bytes: int | None = None
    collectives: Callable[[dist.ProcessGroup], Any] | None = None
    lanes: Callable[[torch.device], Any] | None = None

    def __post_init__(self) -> None:
        if self.direct_min_bytes is not None and not (_is_number(self.direct_min_bytes) and self.direct_min_bytes >= 0):
            raise ValueError(f"CommPolicy.direct_min_bytes must be None or a number >= 0, got {self.direct_min_bytes!r}.")
        check_int("CommPolicy.reductions_in_flight", self.reductions_in_flight)
        if self.prefetch_bytes is not None:
            check_int("CommPolicy.prefetch_bytes", self.prefetch_bytes, least=0, otherwise=", or None")
        for name in ("collectives", "lanes"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ValueError(f"CommPolicy.{name} must be callable or None, got {value!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


LINTS = ("root", "optimizer", "added")


class LintWarning(UserWarning):
    """A warning that a sharded model wastes memory or may train wrongly. `CheckPolicy(silence=...)` turns it off by name."""


@dataclass(frozen=True)
class CheckPolicy:
    """The checks that run while training.

    Args:
        heartbeat: end each backward that sets `.grad` with one all-reduce. Its message has a hash of the collectives that this
            rank ran, which must be equal on all ranks, and one byte per trainable parameter, rounded up to whole KiB. The bytes
            show which parameters were used: if no rank used a parameter, its `.grad` stays None; if some rank did, every rank
            gets its shard of the mean. Without a heartbeat, a parameter that this rank did not use gets a gradient (zeros, if
            no rank used it). With or without one, such a backward also reduces what `accumulate()` kept in units of the model
            that this backward did not enter. These must be the same units on all ranks.
        every: end only every n-th backward that sets `.grad` with a heartbeat; the others behave as without one. At least 1.
        patience: seconds that a rank waits for a collective before it requests the states of the other ranks through the
            store of the process group. If ranks ran different units, all ranks raise an error naming these. At least 0.
        timeout: seconds after which a waiting rank raises an error naming the unit and the states of the other ranks (up to
            five seconds later if states are missing). None waits as long as the process group does.
        silence: names of lint warnings to turn off: "root" (the outermost unit has most of the parameters), "optimizer" (an
            optimizer steps plain parameters beside sharded ones), and "added" (trainable parameters were added to a unit
            after fully_shard), which is an error, or a warning if they have hooks on their gradients: silence it if you reduce
            their gradients yourself. `fullshard.lint(model)` returns further remarks.

    Raises:
        ValueError: if a name is unknown, or a number has the wrong type or is below its minimum.

    Example:
        >>> fully_shard(model, check_policy=CheckPolicy(timeout=300, silence=("root",)))      # doctest: +SKIP
    """

    heartbeat: bool = True
    every: int = 1
    patience: float = 1.0
    timeout: float | None = None
    silence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.silence, str) or not isinstance(self.silence, Iterable):
            raise ValueError(f"CheckPolicy.silence takes a tuple of names, as in ('root',), got {self.silence!r}.")
        unknown = [name for name in self.silence if name not in LINTS]
        if unknown:
            raise ValueError(f"CheckPolicy.silence takes names out of {LINTS}, got {unknown[0]!r}.")
        object.__setattr__(self, "heartbeat", check_bool("CheckPolicy.heartbeat", self.heartbeat))
        check_int("CheckPolicy.every", self.every)
        if not (_is_number(self.patience) and self.patience >= 0):
            raise ValueError(f"CheckPolicy.patience must be a number of seconds >= 0, got {self.patience!r}.")
        if self.timeout is not None and not (_is_number(self.timeout) and self.timeout > 0):
            raise ValueError(f"CheckPolicy.timeout must be None or a number of seconds > 0, got {self.timeout!r}.")
