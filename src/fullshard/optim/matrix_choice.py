"""`matrices_of`: which parameters of a model an optimizer of whole matrices takes, and which are left to another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fullshard.core import clean_name

OUTPUT_NAMES = ("lm_head", "head", "output", "classifier", "score")
"""Last parts of qualified names of modules that are output layers, outside of numbered layers."""

ROUTER_NAMES = ("gate", "router")
"""Last parts of qualified names of modules that are routers of experts, if they have few rows."""

_FEW_ROWS = 8  # a router has at most as many rows as its columns divided by this


@dataclass(frozen=True)
class MatrixChoice:
    """Parameters of a model by the optimizer that suits them. Made by `matrices_of`; print it for a table.

    Args:
        matrices: the parameters for an optimizer of whole matrices, in the order of the model.
        rest: all others, for an element-wise optimizer.
        reasons: for each parameter, by its qualified name (the first one of a tied parameter): the shape, whether it is taken,
            and why.
    """

    matrices: list[nn.Parameter]
    rest: list[nn.Parameter]
    reasons: dict[str, tuple[tuple[int, ...], bool, str]]

    def __str__(self) -> str:
        lines = []
        for title, wanted in (("matrices", True), ("rest", False)):
            chosen = [(name, shape, reason) for name, (shape, taken, reason) in self.reasons.items() if taken is wanted]
            lines.append(f"{title}: {len(chosen)} parameters")
            alike = Counter((_pattern(name), shape, reason) for name, shape, reason in chosen)
            for (pattern, shape, reason), count in alike.items():
                lines.append(f"  {count:>5} x {pattern}  {' x '.join(map(str, shape)) or 'scalar'}  {reason}".rstrip())
        return "\n".join(lines)


def matrices_of(
    model: nn.Module, *, take: Sequence[str] = (), leave: Sequence[str] = (), dims: Sequence[int] = (2,)
) -> MatrixChoice:
    """Choose the parameters for an optimizer of whole matrices, as Muon, and those that are left to AdamW.

    The first of these rules that applies decides:

    1. A name that matches a pattern of `leave` is left.
    2. A name that matches a pattern of `take` is taken.
    3. A number of dims that is not in `dims` is left: biases, norms, scalars; convolutions, unless `dims` has 4.
    4. Embeddings are left: parameters of nn.Embedding and nn.EmbeddingBag, those tied to them, and parameters whose own name or
       the last part of their module's name contains "embed".
    5. Parameters of modules whose class has "Norm" in its name are left.
    6. Outside of numbered layers, output layers are left: matrices with as many rows as an embedding of the model, and modules
       named lm_head, head, output, classifier or score.
    7. Routers are left: modules named gate or router with at most an eighth as many rows as columns.
    8. All others are taken.

    Args:
        model: the model, sharded or not, on any device.
        take: patterns of qualified names, as in fnmatch: `"*.router.weight"`.
        leave: patterns of qualified names.
        dims: numbers of dims that are taken. `torch.optim.Muon` takes matrices of two dims only.

    Returns:
        The choice.

    Raises:
        ValueError: if a pattern matches no parameter.

    Example:
        >>> choice = matrices_of(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 6), nn.Linear(6, 9)))
        >>> print(choice)
        matrices: 1 parameters
              1 x *.weight  6 x 4
        rest: 4 parameters
              1 x *.weight  9 x 4  an embedding
              1 x *.bias  6  1 dim
              1 x *.weight  9 x 6  an output layer: as many rows as an embedding
              1 x *.bias  9  1 dim
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"matrices_of takes a model, got {type(model).__name__}.")
    for option, value in (("take", take), ("leave", leave), ("dims", dims)):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"{option} must be a sequence, as in {option}=[...], got {value!r}.")
    names: dict[nn.Parameter, list[str]] = {}  # several of a tied parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    every = [name for listed in names.values() for name in listed]
    for pattern in (*take, *leave):
        if not any(fnmatchcase(name, pattern) for name in every):
            raise ValueError(f"No parameter has a name like '{pattern}'. Names are as in named_parameters(): {every[:3]}, ...")
    modules = {clean_name(name): module for name, module in model.named_modules(remove_duplicate=False)}  # the innermost
    vocabularies = {module.num_embeddings for module in modules.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    choice = MatrixChoice([], [], {})
    for parameter, known_as in names.items():
        taken, reason = False, ""
        if any(fnmatchcase(name, pattern) for name in known_as for pattern in leave):
            reason = "asked for by leave"
        elif any(fnmatchcase(name, pattern) for name in known_as for pattern in take):
            taken, reason = True, "asked for by take"
        elif parameter.ndim not in dims:
            reason = f"{parameter.ndim} dim{'s' if parameter.ndim != 1 else ''}"
        else:
            found = (_role(clean_name(name), tuple(parameter.shape), modules, vocabularies) for name in known_as)
            reason = next((role for role in found if role), "")
            taken = not reason
        (choice.matrices if taken else choice.rest).append(parameter)
        choice.reasons[known_as[0]] = tuple(parameter.shape), taken, reason
    return choice


def _role(name: str, shape: tuple[int, ...], modules: dict[str, nn.Module], vocabularies: set[int]) -> str | None:
    """Return why a parameter is left; None for a matrix of a layer."""
    path, _, own = name.rpartition(".")
    module, last = modules[path], path.rpartition(".")[2]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "embed" in own or "embed" in last:
        return "an embedding"
    if any("Norm" in cls.__name__ for cls in type(module).__mro__):
        return "a norm"
    # A number at the end of the path, as of the last module in nn.Sequential, is that of the module itself, not of a layer.
    is_in_layer = any(part.isdigit() for part in path.split(".")[:-1])
    if len(shape) > 1 and shape[0] in vocabularies and not is_in_layer:
        return "an output layer: as many rows as an embedding"
    if last in OUTPUT_NAMES and not is_in_layer:
        return f"an output layer, by its name {last}"
    if last in ROUTER_NAMES and len(shape) > 1 and shape[0] * _FEW_ROWS <= shape[1]:
        return f"a router, by its name {last} and few rows"
    return None


def _pattern(name: str) -> str:
    """Return the name with a star for each number, so that layers count as one line."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
