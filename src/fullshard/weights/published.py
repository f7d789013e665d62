"""`transformers_rules()`: the checkpoint conversions of transformers as rules of key maps."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fullshard import _torch
from fullshard.core import clean_name
from fullshard.weights.rules import Merge, Rename, RenameBy, Rule, Sort, Split, Stack, Transpose, Unstack


def transformers_rules(model: nn.Module, *, saving: bool = False) -> list[Rule]:
    """Return the rules that transformers applies to a model's checkpoints in `from_pretrained` and `save_pretrained`.

    Published checkpoints may use other names than the model and may store experts one by one. With these rules, `load_weights`
    loads the values that `from_pretrained` loads, and `save_weights` writes the files that `save_pretrained` writes.

    Args:
        model: a `PreTrainedModel` of transformers 5 or newer, on any device, preferably before it is sharded.
        saving: return the rules for `save_weights` instead of those for `load_weights`.

    Returns:
        Rules for `key_map`, all of them optional.

    Raises:
        ValueError: if the model is not from transformers, transformers is too old or missing, or a conversion has no
            equivalent rule.

    Example:
        >>> load_weights(model, "Mixtral-8x7B", key_map=transformers_rules(model))            # doctest: +SKIP
        >>> save_weights(model, "tuned", key_map=transformers_rules(model, saving=True))      # doctest: +SKIP

    Source:
        transformers.conversion_mapping.get_model_conversion_mapping.
    """
    library, conversions = _conversions(model, legacy=not saving)
    if saving:  # a prefix change cannot be reversed: the original prefix of a name is not recorded
        reversible = [one for one in reversed(conversions) if not isinstance(one, library.PrefixChange)]
        conversions = [one.reverse_transform() for one in reversible]
    renamings = [one for one in conversions if isinstance(one, library.WeightRenaming)]
    converters = [one for one in conversions if not isinstance(one, library.WeightRenaming)]
    renaming = RenameBy(lambda name: library.apply_renamings(name, renamings), "transformers")
    renames: list[Rule] = [renaming] if renamings else []
    converts = [rule for converter in converters for rule in _rules_of(converter)]
    # The patterns of converters match names after renaming, so saving, which is the reverse, renames last.
    if saving:
        return [Sort(), *converts, *renames] if conversions else []
    return [Sort(), *renames, *converts, RenameBy(_adjust_prefix(model), "prefix of the base model")]


def _conversions(model: nn.Module, *, legacy: bool) -> tuple[Any, list[Any]]:
    """Return (transformers' module with the conversion classes, the conversions of the model)."""
    try:
        library, mapping, models = (
            importlib.import_module(f"transformers.{name}")
            for name in ("core_model_loading", "conversion_mapping", "modeling_utils")
        )
    except ImportError as missing:
        text = f"transformers_rules() needs transformers 5 or newer ({missing}). Run `pip install -U transformers`."
        raise ValueError(text) from None
    if not isinstance(model, models.PreTrainedModel):
        raise ValueError(f"transformers_rules() takes a PreTrainedModel of transformers, got a {type(model).__name__}.")
    # fully_shard() replaces the class of a module by a subclass, and transformers looks up conversions by the class name.
    for name, module in model.named_modules():
        if isinstance(module, _torch.TorchFSDPModule) and isinstance(module, models.PreTrainedModel):
            own = next(base for base in type(module).__mro__ if not issubclass(base, _torch.TorchFSDPModule))
            if mapping.get_checkpoint_conversion_mapping(own.__name__) is not None:
                raise ValueError(
                    f"'{name}' is sharded already, and transformers finds the rules of a {own.__name__} by its class. Call "
                    "transformers_rules() before the model is sharded."
                )
    return library, mapping.get_model_conversion_mapping(model, add_legacy=legacy)


def _adjust_prefix(model: Any) -> Callable[[str], str]:
    """Return a function that removes the base model's prefix from a name, or adds it, if that gives a name of the model."""
    prefix, model_names = model.base_model_prefix, set(map(clean_name, model.state_dict()))

    def name_of(name: str) -> str:
        if prefix and name not in model_names:
            for adjusted in (name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
                if adjusted in model_names:
                    return adjusted
        return name

    return name_of


# --- conversions ---


def _rules_of(converter: Any) -> list[Rule]:
    """Return the rules of one conversion, which is a chain of operations.

    Intermediate tensors get names with `__step`, which no model has.
    """
    sources, targets = list(converter.source_patterns), list(converter.target_patterns)
    # The text before the name, as one group; conversions of a submodule match only inside of it.
    prefix_pattern = "(.*?)"
    if converter.scope_prefix is not None:
        base, scope = (
            f"{re.escape(part)}[.]" if part else "" for part in (converter.base_model_prefix, converter.scope_prefix)
        )
        prefix_pattern = f"((?:{base})?{scope}.*?)"
    rules: list[Rule] = []
    last = len(converter.operations) - 1
    for number, operation in enumerate(converter.operations):
        kind = type(operation).__name__
        out_count = len(targets) if kind == "Chunk" else 1 if kind == "Concatenate" else len(sources)
        intermediate = [f"{targets[0].replace('*.', '')}.__step{number}_{i}" for i in range(out_count)]
        outs = targets if number == last else intermediate
        known = kind in ("MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Transpose")
        supported = known and len(outs) == out_count and getattr(operation, "num_shards_attribute", None) is None
        if not supported or (kind.endswith("Modulelist") and operation.dim != 0) or getattr(operation, "check_dims", False):
            raise ValueError(
                f"transformers converts {', '.join(sources)} to {', '.join(targets)} by {kind}, which has no equivalent rule. "
                "Pass your own key_map with Convert to load_weights()."
            )
        rules += _operation_rules(kind, operation, prefix_pattern, sources, outs)
        sources = outs
    return rules


def _operation_rules(kind: str, operation: Any, prefix_pattern: str, sources: Sequence[str], outs: Sequence[str]) -> list[Rule]:
    """Return the rules of one operation from `sources` to `outs`."""
    # The groups of a pattern: the prefix, the number in the place of a star if there is one, and the suffix.
    patterns = [prefix_pattern + _name_pattern(source) for source in sources]
    if kind == "MergeModulelist":
        return [Stack(source, _target_name(out, 3), optional=True) for source, out in zip(patterns, outs)]
    if kind == "SplitModulelist":
        return [Unstack(source, _target_name(out, 2), optional=True) for source, out in zip(patterns, outs)]
    if kind == "Concatenate":
        return [Merge(patterns, _target_name(outs[0], 2), dim=operation.dim, optional=True)]
    if kind == "Chunk":
        return [Split(patterns[0], [_target_name(out, 2) for out in outs], dim=operation.dim, optional=True)]
    transposed = [Transpose(f"^{source}$", (operation.dim0, operation.dim1), optional=True) for source in patterns]
    return [*transposed, *(Rename(f"^{source}$", _target_name(out, 2), optional=True) for source, out in zip(patterns, outs))]


def _name_pattern(source: str) -> str:
    """Convert a pattern of transformers to a regular expression: a star matches a number, a dot matches itself.

    The text after the name is one group, which begins at the end of a word.
    """
    plain = source.replace("\\.", ".").removeprefix("^")
    name = "([0-9]+)".join(re.escape(part) for part in plain.split("*"))
    return name + (r"((?!\w).*)" if source[-1:].isalnum() else "(.*)")


def _target_name(target: str, end: int) -> str:
    """Return the replacement for the name of a result: prefix group 1, the name, suffix group `end`."""
    return f"\\g<1>{target.replace('*', '{}')}\\g<{end}>"
