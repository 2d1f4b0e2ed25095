"""The error for an input of a linear layer that has another number of features than the weight takes."""

from __future__ import annotations

from torch import Tensor

from .module import ParallelModule


def refuse_width(
    layer: ParallelModule, input_size: int, x: Tensor, takes: int, *, parallel: bool | None = None
) -> None:
    """Raise ValueError with both sizes. ``takes``: the features that ``layer`` takes on this rank, of
    ``input_size``. ``parallel``: ``input_is_parallel`` of a row layer, None for a column layer."""
    what, tp, has = type(layer).__name__, layer.tp.size, x.shape[-1]
    remedy = ""
    if parallel and has == input_size:
        remedy = "; these are the features of all ranks: leave out input_is_parallel=True, which takes a part"
    elif not parallel and has * tp == input_size:
        remedy = f"; {has} is the part of one of tp={tp} ranks: " + (
            "gather it first (gather_output=True in the layer before, or tpcore.comm.mappings.gather), or "
            "use a RowParallelLinear with input_is_parallel=True"
            if parallel is None
            else "pass input_is_parallel=True"
        )
    raise ValueError(
        f"{what}: the input of shape {tuple(x.shape)} has {has} features, and the layer takes {takes}"
        + (f" of input_size={input_size} on each rank" if parallel else "")
        + remedy
    )
