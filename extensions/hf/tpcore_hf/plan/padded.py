"""Attention whose heads tp does not divide: ranks have whole key heads with their queries, the last ones zeros."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tpcore.layout.shard import Block

from . import rules as plan
from .decisions import Cut, attentions
from .heads import LocalHeads, Need, head_size


def with_padding(model: nn.Module, cuts: list[Cut], tp: int) -> list[Cut]:
    """``cuts`` in which the projections of attentions that do not fit are padded: a head of zeros adds zeros, and its
    gradients are zeros. All that can be padded need no more than a head for each rank; others stay as they are."""
    padded: dict[str, Cut] = {}
    for owner, width, projections in attentions(model, cuts):
        of_owner = [cut for cut in cuts if cut.owner == projections[0].owner or cut.module is owner]
        rows = [cut for cut in of_owner if cut.style == plan.ROW]
        blocks = [block for cut in projections for block in cut.blocks or ()]
        unit, sizes = head_size(owner) or width, [block.size for block in blocks]
        keys = min(sizes, default=width)
        known = all(cut.style in (plan.COLUMN, plan.QKV_COLUMN, plan.ROW, plan.SUMMED) for cut in of_owner)
        known = known and {b.unit for b in blocks} == {unit} and len(rows) == 1
        if not known or sorted(sizes) != [keys, keys, width] or width % keys:
            continue
        fits = all(need.fits(tp) for cut in of_owner for need in cut.needs)
        one = keys == unit < width  # which all ranks have
        share = -(-(width if one else keys) // (unit * tp))
        here = LocalHeads(share if one else share * (width // keys), 1 if one else share)
        of_size = {width: Block(width, unit if one else unit * (width // keys)), keys: Block(keys, unit, replicate=one)}
        for cut in (*projections, *rows):
            divided = [width] if cut in rows else [block.size for block in cut.blocks or ()]
            heads = Need(cut.name, width // unit, "heads", padded=True)
            new = replace(cut, needs=(heads,) if width in divided and cut not in rows else ())
            of_ranks = tuple(of_size[size] for size in divided)
            padded[cut.name] = new if fits else replace(new, blocks=of_ranks, padded=here)
    return [padded.get(cut.name, cut) for cut in cuts]
