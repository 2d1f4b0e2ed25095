"""Whole modules inside sharded blocks: each one is provably right as it is, gets a style, or is refused.

A plan has no rule for a module that its author did not think of. After a sharded projection its gradient
would be that of this rank's heads, in silence, and one module per head would be that of another head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ..layout.shard import Block
from . import plan
from .cuts import Cut, features
from .heads import Need, head_size
from .plan import Rule, rule_of, wildcard
from .source import Flow

_OPENS = frozenset({plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN, plan.EMBEDDING_HEADS})
_CLOSES = frozenset({plan.ROW, plan.PACKED_ROW})


def inside(model: nn.Module, cuts: list[Cut], rules: Mapping[str, Rule]) -> list[Cut]:
    """The cuts of modules without a rule that sharded features reach. One ValueError names all modules for
    which no style is surely right."""
    ends = [cut for cut in cuts if cut.style in _OPENS | _CLOSES]
    opened, closed = (_ancestors([cut for cut in ends if cut.style in s]) for s in (_OPENS, _CLOSES))
    more: list[Cut] = []
    wrong: list[str] = []
    for name, block in model.named_modules():
        prefix = f"{name}." if name else ""
        columns = {child for child, _ in block.named_children() if prefix + child in opened - closed}
        rows = {child for child, _ in block.named_children() if prefix + child in closed}
        if not (columns or (rows and name not in opened)):
            continue  # no sharded features pass here, but perhaps in blocks inside
        near = [cut for cut in ends if cut.name.startswith(prefix)]
        parts = {child: p for child, p in _whole(name, block, rules) if child not in columns | rows}
        unclear = {child: part for child, part in parts.items() if not _is_wide(part, near, block)}
        flow = Flow(block, columns, rows, parts) if unclear and columns else None
        for child, part in unclear.items():
            reached = flow is not None and flow.is_reached(child)
            styled = list(_styled(prefix + child, part, near, block)) if reached else []
            if not styled and not (flow and flow.is_whole(child)):
                wrong.append(_refusal(prefix + child, part, name, block))
            more += styled
    if wrong:
        raise ValueError("; ".join(dict.fromkeys(wrong)))
    return more


def _whole(name: str, block: nn.Module, rules: Mapping[str, Rule]) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """The children and the parameters of ``block`` that have parameters and no rule."""
    for child, module in block.named_children():
        if next(module.parameters(), None) is not None and rule_of(f"{name}.{child}", rules) is None:
            yield child, module
    for child, p in block.named_parameters(recurse=False):
        if rule_of(f"{name}.{child}", rules) is None and rule_of(name, rules) != plan.SUMMED:
            yield child, p


def _ancestors(cuts: list[Cut]) -> set[str]:
    """The names of the cut modules and of all modules around them."""
    parts = [cut.name.split(".") for cut in cuts]
    return {".".join(names[:i]) for names in parts for i in range(len(names) + 1)}


def _shapes(part: nn.Module | nn.Parameter) -> set[tuple[int, ...]]:
    tensors = [part] if isinstance(part, nn.Parameter) else part.parameters()
    return {tuple(p.shape) for p in tensors}


def _is_wide(part: nn.Module | nn.Parameter, near: list[Cut], block: nn.Module) -> bool:
    """Whether it is as wide as the block's whole inputs and outputs: sharded features have not this width."""
    linear = [cut for cut in near if cut.style != plan.EMBEDDING_HEADS]
    wide = {features(cut.module)[cut.style in _CLOSES] for cut in linear} - {head_size(block)}
    return all(len(shape) == 1 and shape[0] in wide for shape in _shapes(part))


def _styled(name: str, part: nn.Module | nn.Parameter, near: list[Cut], block: nn.Module) -> Iterator[Cut]:
    """The cuts of a module with sharded inputs: summed if it treats all heads alike, else by heads."""
    if isinstance(part, nn.Parameter):
        return
    size, heads = head_size(block), {n.count for cut in near for n in cut.needs if n.what.endswith("heads")}
    lists = [child for child in part.modules() if isinstance(child, nn.ModuleList)]
    counts = {len(child) for child in lists} if lists else {s[0] for s in _shapes(part) if len(s) == 2}
    if size is None:
        return
    if not lists and _shapes(part) == {(size,)}:
        for inner, module in part.named_modules():
            yield Cut(f"{name}.{inner}".rstrip("."), module, plan.SUMMED)
    elif len(counts) == 1 and counts <= heads and _shapes(part) == {(size,) if lists else (*counts, size)}:
        (count,) = counts
        need = Need(name, count, "heads", shared=True)
        yield Cut(name, part, plan.PARAMETER_HEADS, (Block(count, 1, replicate=True),), (need,))


def _refusal(name: str, part: nn.Module | nn.Parameter, owner: str, block: nn.Module) -> str:
    shapes = ", ".join(map(str, sorted(_shapes(part))))
    summed = owner if isinstance(part, nn.Parameter) else name
    return (
        f"{wildcard(name)} ({type(part).__name__}, {shapes}) is whole inside the sharded "
        f"{type(block).__name__}, and its use does not show how: plan={{{wildcard(summed)!r}: "
        f"{plan.SUMMED!r}}} says that it treats all heads and features alike, of which it sees this rank's, "
        f"{{{wildcard(name)!r}: {plan.REPLICATE!r}}} that it sees, and meets, whole values only"
    )
