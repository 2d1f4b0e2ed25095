"""The marks by which scripts say how they have sharded a parameter themselves, read as its layout."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tpcore.layers.sharding import ForeignMarks, Sharding
from tpcore.layout.layout import AxisCut, Layout
from tpcore.layout.shard import ShardSpec
from tpcore.runtime.context import current, is_initialized

EXPERTS = ("ep",)


def cut_of_layer(layout: Layout) -> AxisCut | None:
    """The first cut, but for that over experts."""
    return next((cut for cut in layout.cuts if cut.axes != EXPERTS), None)


class PublishedMarks(ForeignMarks):
    """``tensor_model_parallel``: tp ranks have parts along ``partition_dim`` (0), of ``partition_stride`` fused ones.
    ``expert_model_parallel``: ep ranks have other experts, counted by dim 0."""

    @staticmethod
    def read(tensor: Tensor, known: Sharding | None) -> Sharding | None:
        marks = vars(tensor)
        over_tp, over_ep = marks.get("tensor_model_parallel"), marks.get("expert_model_parallel")
        if (over_tp is None and over_ep is None) or (known is None and not is_initialized()):
            return known
        ctx = current() if known is None else known.ctx
        layout = Layout(tuple(tensor.shape)) if known is None else known.layout
        tp, ep = (ctx.mesh.axes.get(axis, 1) for axis in ("tp", "ep"))
        cut = cut_of_layer(layout)
        apart = any(of.axes == EXPERTS for of in layout.cuts)
        # a parameter of a parallel layer has a sharding, and one of a stage has its place
        of_layer = known is not None and layout.slot is None
        uncut, whole = not over_tp and over_tp is not None, not over_ep and over_ep is not None
        wrong = (uncut and cut) or (over_tp and of_layer and not layout.cuts)
        if (tp > 1 and wrong) or (ep > 1 and whole and apart):
            raise ValueError(
                f"tensor_model_parallel={over_tp} and expert_model_parallel={over_ep} of a tensor of shape "
                f"{tuple(tensor.shape)}, and its layer has it as {layout}: leave its marks as the layer sets them"
            )
        if over_tp and tp > 1 and not layout.cuts:
            # -1 is the published default
            layout = _cut(layout, max(marks.get("partition_dim") or 0, 0), tp, "tp", marks.get("partition_stride") or 1)
        if over_ep and ep > 1 and not apart:
            layout = _cut(layout, 0, ep, "ep")
        return known if known is not None and layout is known.layout else Sharding(layout, ctx)


def _cut(layout: Layout, dim: int, n: int, axis: str, stride: int = 1) -> Layout:
    """``layout``, whose tensor is one of ``n`` parts along ``dim``. ValueError if there is no such dim."""
    if not dim < len(layout.shape):
        raise ValueError(f"a tensor of shape {layout.shape} is marked as one of {n} parts along dim {dim}: it has none")
    shape = (*layout.shape[:dim], layout.shape[dim] * n, *layout.shape[dim + 1 :])
    along = [cut for cut in layout.cuts if cut.spec.dim == dim]
    if any(cut.spec != ShardSpec(layout.shape, dim) for cut in along):
        raise ValueError(
            f"a tensor of {layout} is marked as one of {n} parts over {axis}: blocks of dim {dim} cannot be told "
            "apart from these; put experts along a dim of their own, in front"
        )
    blocks = [() if cut in along else cut.spec.blocks for cut in layout.cuts]
    specs = [ShardSpec(shape, cut.spec.dim, b) for cut, b in zip(layout.cuts, blocks, strict=True)]
    cuts = [replace(cut, spec=spec) for cut, spec in zip(layout.cuts, specs, strict=True)]
    return Layout(shape, (*cuts, AxisCut((axis,), ShardSpec.strided(shape, dim, stride))), layout.slot)
