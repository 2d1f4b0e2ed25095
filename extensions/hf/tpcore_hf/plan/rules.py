"""The rules of a plan: a style for each module. The only module that knows the names of the styles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from torch import nn

from tpcore.layout.shard import Block

Rule = str | Sequence[Block]
"""The name of a style, or the blocks in which a linear layer's output features are sharded."""

COLUMN, COLUMN_GATHERED = "colwise", "colwise_gather_output"
ROW, ROW_SPLIT = "rowwise", "rowwise_split_input"
PACKED_COLUMN, PACKED_ROW, QKV_COLUMN = "packed_colwise", "packed_rowwise", "qkv_colwise"
EMBEDDING_ROW, EMBEDDING_COLUMN, EMBEDDING_HEADS = "embedding_rowwise", "embedding_colwise", "embedding_heads"
HEADS_ARGUMENT = "heads_argument"
SUMMED, REPLICATE, LOCAL_PARAMETERS = "replicated_with_grad_allreduce", "replicate", "local_params"
EXPERTS, PARTIAL, IDENTITY_EXPERT = "moe_tp_experts", "all_reduce", "moe_identity_expert"
LATENT = "mla_kv_a_proj"
PARAMETER_HEADS = "parameter_heads"

STYLES = frozenset(
    {COLUMN, COLUMN_GATHERED, ROW, ROW_SPLIT, PACKED_COLUMN, PACKED_ROW, QKV_COLUMN}
    | {EMBEDDING_ROW, EMBEDDING_COLUMN, EMBEDDING_HEADS, HEADS_ARGUMENT, SUMMED, REPLICATE, LOCAL_PARAMETERS}
    | {EXPERTS, PARTIAL, IDENTITY_EXPERT, LATENT, PARAMETER_HEADS}
)


def wildcard(name: str) -> str:
    """``name`` with ``*`` for each number between dots, and for that of an ``expert_1``."""
    return re.sub(r"(?<![^.])(expert_)?\d+(?![^.])", r"\1*", name)


def general(model: nn.Module, name: str) -> str:
    """``name`` with ``*`` for each number but those of modules in a row that differ."""
    owners = [model.get_submodule(name[: match.start()].rstrip(".")) for match in re.finditer(r"[^.]+", name)]
    parts = zip(name.split("."), owners, strict=True)
    return ".".join(part if _differ(owner) else wildcard(part) for part, owner in parts)


def _differ(owner: nn.Module) -> bool:
    return isinstance(owner, nn.Sequential) or (isinstance(owner, nn.ModuleList) and len({*map(type, owner)}) > 1)


def rule_of(name: str, rules: Mapping[str, Rule]) -> Rule | None:
    """The rule for a module or parameter: of its own name, else with the fewest ``*``, the later of two."""
    if name in rules:
        return rules[name]
    fitting = [pattern for pattern in reversed(list(rules)) if "*" in pattern and _pattern(pattern).fullmatch(name)]
    return rules[min(fitting, key=lambda pattern: pattern.count("*"))] if fitting else None


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """Of names with a number for each ``*``; a number that is written stands for itself."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+"))


def checked(user: Mapping[str, Rule], names: Iterable[str]) -> None:
    """Raise ValueError for rules that match no name: a misspelt rule would silently leave a layer whole."""
    known = list(names)
    unused = [pattern for pattern in user if not any(map(_pattern(pattern).fullmatch, known))]
    if unused:
        raise ValueError(
            f"rules of the plan match no module and no parameter: {', '.join(map(repr, unused))}. Names are "
            "those of model.named_modules(), with * for the number of a layer or of an expert_1"
        )


def unknown_style(name: str, kind: type, style: str, owner: str = "") -> str:
    """``owner``: the module of a parameter, which stays whole with it."""
    ours = kind.__module__.partition(".")[0] in ("torch", "transformers")
    class_name = kind.__name__ if ours else f"{kind.__module__}.{kind.__name__}"
    misspelt = style not in STYLES and kind is nn.Linear
    styles = f"; the styles are {', '.join(sorted(STYLES))}" if misspelt else ""
    return (
        f"{name} ({class_name}): style {style!r} is not supported for it: plan={{{wildcard(owner or name)!r}: "
        f"'replicate'}} leaves it whole on every rank{styles}"
    )
