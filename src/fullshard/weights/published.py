"""Rules that a library of models has for its own checkpoints, as rules of key maps."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fullshard import _torch
from fullshard.weights.rules import Merge, Rename, RenameBy, Rule, Sort, Split, Stack, Transpose, Unstack


def transformers_rules(model: nn.Module, *, saving: bool = False) -> list[Rule]:
    """Take the rules that transformers has for a model's checkpoints, as `from_pretrained` and `save_pretrained` use them.

    A checkpoint as it was published has other names than the model, and experts one by one. With these rules `load_weights`
    gives the values of `from_pretrained`, and `save_weights` writes the files of `save_pretrained`.

    Args:
        model: a `PreTrainedModel` of transformers 5 or newer, on any device, best before it is sharded.
        saving: whether they are for `save_weights`; else for `load_weights`.

    Returns:
        Rules for `key_map`. All of them may fit nothing.

    Raises:
        ValueError: for a model of something else, a transformers that has no such rules, or a conversion that no rule can say.

    Example:
        >>> load_weights(model, "Mixtral-8x7B", key_map=transformers_rules(model))            # doctest: +SKIP
        >>> save_weights(model, "tuned", key_map=transformers_rules(model, saving=True))      # doctest: +SKIP

    Source:
        transformers.conversion_mapping.get_model_conversion_mapping.
    """
    library, conversions = _conversions(model, legacy=not saving)
    if saving:  # what was added in front of a name cannot be known any more
        kept = [one for one in reversed(conversions) if not isinstance(one, library.PrefixChange)]
        conversions = [one.reverse_transform() for one in kept]
    renamings = [one for one in conversions if isinstance(one, library.WeightRenaming)]
    converters = [one for one in conversions if not isinstance(one, library.WeightRenaming)]
    names: list[Rule] = [RenameBy(lambda name: library.apply_renamings(name, renamings), "transformers")] if renamings else []
    made = [rule for converter in converters for rule in _rules_of(converter)]
    if saving:
        return [Sort(), *made, *names] if conversions else []
    return [Sort(), *names, *made, RenameBy(_with_prefix(model), "prefix of the base model")]


def _conversions(model: nn.Module, *, legacy: bool) -> tuple[Any, list[Any]]:
    """(the module of transformers with the classes, the conversions of a model)."""
    try:
        library, mapping, models = (
            importlib.import_module(f"transformers.{name}")
            for name in ("core_model_loading", "conversion_mapping", "modeling_utils")
        )
    except ImportError as missing:
        text = f"transformers_rules() needs transformers 5 or newer ({missing}): pip install -U transformers"
        raise ValueError(text) from None
    kind = models.PreTrainedModel
    if not isinstance(model, kind):
        raise ValueError(f"transformers_rules() takes a PreTrainedModel of transformers, got a {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, _torch.TorchFSDPModule) and isinstance(module, kind):
            own = next(base for base in type(module).__mro__ if not issubclass(base, _torch.TorchFSDPModule))
            if mapping.get_checkpoint_conversion_mapping(own.__name__) is not None:
                raise ValueError(
                    f"'{name}' is sharded already, and transformers finds the rules of a {own.__name__} by its class: call "
                    "transformers_rules() before the model is sharded"
                )
    return library, mapping.get_model_conversion_mapping(model, add_legacy=legacy)


def _with_prefix(model: Any) -> Callable[[str], str]:
    """Add the prefix of the base model to a name, or take it away, if the model has the other one."""
    prefix, known = model.base_model_prefix, set(model.state_dict())

    def name_of(name: str) -> str:
        if not prefix or name in known:
            return name
        without = name.removeprefix(f"{prefix}.")
        return without if without != name and without in known else f"{prefix}.{name}" if f"{prefix}.{name}" in known else name

    return name_of


# --- conversions ---


def _rules_of(converter: Any) -> list[Rule]:
    """The rules of one conversion: a chain of operations, whose intermediate tensors have names that no model has."""
    sources, targets = list(converter.source_patterns), list(converter.target_patterns)
    begin = _begin(converter)
    rules: list[Rule] = []
    last = len(converter.operations) - 1
    for number, operation in enumerate(converter.operations):
        kind = type(operation).__name__
        many = len(targets) if kind == "Chunk" else 1 if kind == "Concatenate" else len(sources)
        between = [f"{targets[0].replace('*.', '')}.__step{number}_{i}" for i in range(many)]
        outs = targets if number == last else between
        known = kind in ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Transpose")
        fits = known and len(outs) == many and getattr(operation, "num_shards_attribute", None) is None
        if not fits or (kind.endswith("Modulelist") and operation.dim != 0) or getattr(operation, "check_dims", False):
            raise ValueError(
                f"transformers makes {', '.join(targets)} of {', '.join(sources)} by {kind}, for which there is no rule: give "
                "load_weights() a key_map of your own, with Convert"
            )
        rules += _step(kind, operation, begin, sources, outs)
        sources = outs
    return rules


def _begin(converter: Any) -> str:
    """A pattern of what is before the name, as one group: conversions of a part of a model fit only below it."""
    if converter.scope_prefix is None:
        return "(.*?)"
    base, scope = (f"{re.escape(part)}[.]" if part else "" for part in (converter.base_model_prefix, converter.scope_prefix))
    return f"((?:{base})?{scope}.*?)"


def _step(kind: str, operation: Any, begin: str, sources: Sequence[str], outs: Sequence[str]) -> list[Rule]:
    """The rules of one operation."""
    froms = [begin + _pattern(source) + _end(source) for source in sources]
    if kind == "MergeModulelist":
        return [Stack(source, _to(out, 3), optional=True) for source, out in zip(froms, outs)]
    if kind == "SplitModulelist":
        return [Unstack(source, _to(out, 2), optional=True) for source, out in zip(froms, outs)]
    if kind == "Concatenate":
        return [Merge(froms, _to(outs[0], 2), dim=operation.dim, optional=True)]
    if kind == "Chunk":
        return [Split(froms[0], [_to(out, 2) for out in outs], dim=operation.dim, optional=True)]
    turned = [Transpose(f"^{source}$", (operation.dim0, operation.dim1), optional=True) for source in froms]
    return [*turned, *(Rename(f"^{source}$", _to(out, 2), optional=True) for source, out in zip(froms, outs))]


def _pattern(source: str) -> str:
    """A pattern of transformers as one of ours: a star is a number, and a dot is itself."""
    plain = source.replace("\\.", ".").removeprefix("^")
    return "([0-9]+)".join(re.escape(part) for part in plain.split("*"))


def _end(source: str) -> str:
    """What is behind it, as one group: nothing that goes on with the same word."""
    return r"((?!\w).*)" if source[-1:].isalnum() else "(.*)"


def _to(target: str, end: int) -> str:
    """The name of a result, between the groups of what is before and behind it."""
    return f"\\g<1>{target.replace('*', '{}')}\\g<{end}>"


__all__ = ["transformers_rules"]
