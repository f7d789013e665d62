"""Options as values: what a caller may leave unsaid, each resolving once to a value without None."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from fullshard import _torch

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class GradDtype:
    """The `Tensor.grad_dtype` of a parameter.

    explicit  dtype       a `.grad` is
    False     (ignored)   in the dtype of the parameter, whatever that is cast to
    True      a dtype     in this dtype, also when the parameter is cast
    True      None        in whatever dtype it was computed and reduced in
    """

    explicit: bool = False
    dtype: torch.dtype | None = None


UNSET_GRAD_DTYPE = GradDtype()
"""The `grad_dtype` of a parameter of which nobody set it."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes of a group: of its shards, of its unsharded parameters, of its reductions, and of its `.grad`s.

    `grad` None: a `.grad` keeps the dtype that it was reduced in.
    """

    storage: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype | None

    @property
    def casts_gradients(self) -> bool:
        """True if the reduction casts gradients, so that autograd leaves them in the dtype in which they were computed.

        Before torch 2.15 autograd casts them to the compute dtype first, as under FSDP2, unless `grad_dtype` was set.
        """
        asked = _torch.REDUCES_IN_GRAD_DTYPE or self.grad != self.storage
        return asked and (self.reduce != self.compute or self.grad != self.compute)

    @property
    def reduced(self) -> torch.dtype:
        """The dtype of reduced gradients."""
        return self.reduce if self.grad is None else self.grad


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes a unit computes and communicates in. Same fields and meaning as FSDP2's class of this name.

    A `.grad` is in the parameter's `grad_dtype`; unset, that is its storage dtype. Integer and boolean parameters are never
    cast.

    Args:
        param_dtype: dtype of the gathered parameters and so of forward and backward; None keeps the storage dtype.
        reduce_dtype: dtype gradients are reduced (and accumulated without communication) in. None means what it means to the
            installed torch: from 2.15 on the dtype of `.grad`, before that the compute dtype. A `grad_dtype` that was set on
            the parameter goes before the compute dtype.
        output_dtype: floating-point outputs of the unit's forward are cast to it; None leaves them.
        cast_forward_inputs: whether floating-point inputs of the unit's forward are cast to `param_dtype`.
        param_dtype_override_fn: called once with each parameter, in `fully_shard`. Returns the dtype of the parameter to have
            it gathered in that, or `param_dtype` or None for no exception. Inputs are cast to `param_dtype` all the same.

    Raises:
        ValueError: for a dtype that is not a floating-point torch.dtype, or an override that cannot be called.

    Example:
        >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).resolve(torch.float32)
        Dtypes(storage=torch.float32, compute=torch.bfloat16, reduce=torch.float32, grad=torch.float32)

    Source: Micikevicius et al. 2018 (arXiv 1710.03740); `torch.distributed.fsdp.MixedPrecisionPolicy` (torch 2.15).
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[torch.nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise ValueError(f"MixedPrecisionPolicy.param_dtype_override_fn must be callable or None, got {override!r}")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecisionPolicy.{name} must be a floating-point torch.dtype or None, got {dtype!r}")

    def resolve(self, storage: torch.dtype, grad_dtype: GradDtype = UNSET_GRAD_DTYPE, *, keeps_dtype: bool = False) -> Dtypes:
        """Resolve the dtypes of parameters that are stored in `storage`.

        Args:
            storage: dtype of the shards.
            grad_dtype: that of the parameters.
            keeps_dtype: whether `param_dtype_override_fn` had the parameters gathered in their own dtype.

        Returns:
            The dtypes; only that of gradients may be None.
        """
        if not storage.is_floating_point:
            return Dtypes(storage, storage, storage, storage)
        compute = storage if keeps_dtype else self.param_dtype or storage
        grad = grad_dtype.dtype if grad_dtype.explicit else storage
        reduce = self.reduce_dtype
        if reduce is None:
            follows = grad_dtype.explicit or _torch.REDUCES_IN_GRAD_DTYPE
            reduce = grad if follows and grad is not None else compute
        return Dtypes(storage, compute, reduce, grad)

    def keeps_dtype_of(self, parameter: torch.nn.Parameter, *, name: str) -> bool:
        """Ask `param_dtype_override_fn` whether a parameter is gathered in its own dtype.

        Args:
            parameter: as the caller has it, before it is sharded.
            name: qualified, for the error.

        Returns:
            True if the dtype of the parameter goes before `param_dtype`.

        Raises:
            ValueError: for another dtype.
        """
        if self.param_dtype_override_fn is None:
            return False
        chosen = self.param_dtype_override_fn(parameter)
        if chosen not in (None, self.param_dtype, parameter.dtype):
            raise ValueError(
                f"param_dtype_override_fn of parameter '{name}': expected None, {self.param_dtype} (param_dtype) or "
                f"{parameter.dtype} (its own), got {chosen!r}. Other dtypes cannot be gathered in"
            )
        return chosen is not None and chosen == parameter.dtype and chosen != self.param_dtype

    def without_override(self) -> MixedPrecisionPolicy:
        """Return the policy for parameters that were asked about already.

        Returns:
            The same dtypes without `param_dtype_override_fn`.
        """
        if self.param_dtype_override_fn is None:
            return self
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, self.output_dtype, self.cast_forward_inputs)

    def for_planning(self) -> MixedPrecisionPolicy:
        """Return the policy for a plan, which has no parameters to ask about.

        Returns:
            The policy itself.

        Raises:
            ValueError: with a `param_dtype_override_fn`.
        """
        if self.param_dtype_override_fn is not None:
            raise ValueError(
                "a plan knows names and sizes of parameters, which param_dtype_override_fn cannot be asked about: expected "
                "mp_policy without it. Give units of such parameters a policy of their own (PlannedUnit(options=...))"
            )
        return self

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are cast to; None casts none."""
        return self.param_dtype if self.cast_forward_inputs else None


def resolve_mp(policy: Any) -> MixedPrecisionPolicy:
    """Return the policy as one of ours; torch's, with the same fields, means the same.

    Raises ValueError for anything else, and for a field of torch's that is set and unknown here.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if not _is_of_torch(policy) or type(policy).__name__ != "MixedPrecisionPolicy":
        raise ValueError(f"mp_policy must be a MixedPrecisionPolicy, got {type(policy).__name__}")
    return MixedPrecisionPolicy(**_fields_of(policy, MixedPrecisionPolicy))


def resolve_offload(policy: Any) -> OffloadPolicy:
    """Return the policy as one of ours, as `resolve_mp`, for where shards are stored."""
    if isinstance(policy, OffloadPolicy):
        return policy
    kinds = {"OffloadPolicy": OffloadPolicy, "CPUOffloadPolicy": CPUOffloadPolicy}
    if not _is_of_torch(policy) or type(policy).__name__ not in kinds:
        raise ValueError(f"offload_policy must be an OffloadPolicy, got {type(policy).__name__}")
    kind = kinds[type(policy).__name__]
    return kind(**_fields_of(policy, kind))


def _fields_of(policy: Any, kind: type[Any]) -> dict[str, Any]:
    """Return the values of torch's policy for the fields of our class `kind`.

    Raises ValueError for a further field that is not at its default: a newer torch has options that nobody here honours.
    """
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
                f"torch's {type(policy).__name__} has {one.name}={value!r}, which fullshard does not know: expected its "
                f"default, {default!r}. Leave it out, or use a fullshard that knows it"
            )
    return values


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.startswith("torch.distributed.")


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards are stored: this base class leaves them on the device of the mesh.

    Source: `torch.distributed.fsdp.OffloadPolicy`.
    """


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, gradients and so optimizer states live in the memory of the host.

    Each gather begins with one copy of a group's flat shard to the device, each reduction ends with one copy of its
    flat gradient to the host; both are queued on the lanes of the collectives and overlap with compute.

    Args:
        pin_memory: whether host memory is page-locked, so that copies do not hold the host up. Skipped, and said once, where
            there is no accelerator to copy to.

    Source: Ren et al. 2021, ZeRO-Offload (arXiv 2101.06840); `torch.distributed.fsdp.CPUOffloadPolicy`.
    """

    pin_memory: bool = True


DIRECT_MIN_BYTES = 256 << 10
"""Bytes per rank from which on a parameter is worth a message: measured for gloo (docs/performance.md), for nccl a guess."""


@dataclass(frozen=True)
class CommPolicy:
    """How messages are cut and carried.

    Args:
        direct_min_bytes: a parameter whose chunk per rank has at least this many bytes (of its compute dtype) travels
            directly, without a copy; smaller ones share one packed message. None takes what was measured for the backend,
            has parameters of at least 8 MiB over all ranks travel directly, too (the 16 largest of a unit, if a rank's chunk
            has at least 4 KiB), more of them as long as more than 32 MiB and a tenth of the unit would be packed, and sums
            parameters of so few rows that they would be padding for the most part; `float("inf")` packs everything, 0 packs
            nothing that can be avoided.
        reductions_in_flight: how many groups' gradients may be on their way before backward waits for the oldest, at least 1.
        prefetch_bytes: units are gathered ahead, in the order of the last run, as long as all that are ahead together have at
            most this many bytes of full parameters; None gathers exactly one unit ahead, 0 none.
        collectives: called with each process group that a unit uses (shards, and if there are any: replicas, separate
            reductions, the smaller group of an int reshard), returns the `Collectives` to use instead of torch's.
        lanes: called with the device, returns a fresh `Lane`; None takes CUDA streams or asynchronous CPU work.

    Raises:
        ValueError: for a number below its least value, or of another type.

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
            raise ValueError(f"CommPolicy.direct_min_bytes must be None or a number >= 0, got {self.direct_min_bytes!r}")
        if not _is_int(self.reductions_in_flight) or self.reductions_in_flight < 1:
            raise ValueError(f"CommPolicy.reductions_in_flight must be an int >= 1, got {self.reductions_in_flight!r}")
        if self.prefetch_bytes is not None and not (_is_int(self.prefetch_bytes) and self.prefetch_bytes >= 0):
            raise ValueError(f"CommPolicy.prefetch_bytes must be None or an int >= 0, got {self.prefetch_bytes!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


LINTS = ("root", "large", "padding", "ignored", "prefetch", "optimizer", "gradients", "hidden", "added")


class LintWarning(UserWarning):
    """One line about a sharded model that wastes memory or may train wrongly; `CheckPolicy(silence=...)` knows it by name."""


@dataclass(frozen=True)
class CheckPolicy:
    """The checks that run while training.

    Args:
        heartbeat: one all-reduce ends each synchronised backward: a hash of what this rank ran, which must be that of all,
            and a byte per trainable parameter, in whole KiB. By it a rank that did not use a parameter learns whether any
            other did: used nowhere leaves `.grad` None, used somewhere gives every rank its part of the mean. Without it, a
            parameter that this rank did not use gets a gradient (of zeros, if no rank used it). It also tells of which units
            ranks kept gradients (`accumulate()`) that this backward did not enter, so that all ranks reduce them now. Without
            it each rank goes by its own backwards, which must then be of the same units on all ranks.
        every: only each n-th synchronised backward ends with a heartbeat; the others are as without it. At least 1.
        patience: seconds that a rank waits for a message of others before it asks, through the store of the process group,
            where they are. Ranks that ran different units then stop, each naming both. At least 0.
        timeout: seconds after which a rank that waits gives up, naming the unit and where the others are (up to five more if
            some did not say so yet); None waits as long as the process group does.
        poison: for tests. Memory of gathered parameters is filled with NaN before it is gathered into and before it is freed,
            so that computing too early or too late shows; on lanes that begin messages late (`CommPolicy.lanes`) it always
            does. Costs two passes over the memory.
        silence: names of remarks that are not wanted: "root" (the outermost unit holds most of the parameters), "large" (a
            unit far larger than the others), "padding" (above a tenth), "ignored" (trainable, and reduced by nobody),
            "prefetch" (often missed), "optimizer" (it steps plain parameters beside sharded ones), "gradients" (its first
            step finds none), "hidden" (an output that no search finds), and "added", which is an error: trainable parameters
            put into a unit after fully_shard, whose gradients the caller reduces.

    Raises:
        ValueError: for a remark that there is not, or a number below its least value or of another type.

    Example:
        >>> fully_shard(model, check_policy=CheckPolicy(timeout=300, silence=("root",)))      # doctest: +SKIP
    """

    heartbeat: bool = True
    every: int = 1
    patience: float = 1.0
    timeout: float | None = None
    poison: bool = False
    silence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.silence, str) or not isinstance(self.silence, Iterable):
            raise ValueError(f"CheckPolicy.silence takes a tuple of names, as in ('root',), got {self.silence!r}")
        unknown = [name for name in self.silence if name not in LINTS]
        if unknown:
            raise ValueError(f"CheckPolicy.silence takes names out of {LINTS}, got {unknown[0]!r}")
        if not (_is_int(self.every) and self.every >= 1):
            raise ValueError(f"CheckPolicy.every must be an int >= 1, got {self.every!r}")
        if not (_is_number(self.patience) and self.patience >= 0):
            raise ValueError(f"CheckPolicy.patience must be a number of seconds >= 0, got {self.patience!r}")
        if self.timeout is not None and not (_is_number(self.timeout) and self.timeout > 0):
            raise ValueError(f"CheckPolicy.timeout must be None or a number of seconds > 0, got {self.timeout!r}")
