"""``output_attentions=True`` on a sharded model: the attention weights of all heads, gathered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm
from .transformers import pretrained

_WHOLE = "_tpcore_whole"


@dataclass(frozen=True)
class _Gather:
    """A hook of a model of transformers. ``heads``: all heads of attentions by the number on one rank."""

    comm: Comm
    heads: Mapping[int, int]

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Mapping):
            for name in [name for name in output if "attentions" in name and output[name] is not None]:
                output[name] = tuple(map(self._whole, output[name]))  # type: ignore[index]
        elif kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
            raise ValueError(
                f"output_attentions=True of a sharded {type(model).__name__} needs return_dict=True: in a "
                "tuple the weights of a rank's heads cannot be told from other outputs"
            )

    def _whole(self, weights: Tensor | None) -> Tensor | None:
        """``weights``, ``[batch, heads, tokens, tokens]``, of all heads. A model around this one finds them
        marked."""
        if weights is None or hasattr(weights, _WHOLE):
            return weights
        if weights.ndim != 4 or weights.shape[1] not in {*self.heads, *self.heads.values()}:
            raise ValueError(
                f"output_attentions=True: in weights of shape {tuple(weights.shape)} the heads of this rank "
                "are not found, so that those of all ranks cannot be returned: leave it out"
            )
        if weights.shape[1] not in self.heads:  # of an attention that every rank has whole
            return weights
        whole = ops.gather(weights, self.comm, 1)
        setattr(whole, _WHOLE, True)
        return whole


def gather_attentions(model: nn.Module, heads: Mapping[nn.Module, int], comm: Comm) -> None:
    """Return the weights of all heads where they are asked for. ``heads``: the number of all query heads of
    each sharded attention."""
    for _, part in pretrained(model):
        inside = {heads[m] // comm.size: heads[m] for m in part.modules() if m in heads}
        if inside:
            part.register_forward_hook(_Gather(comm, inside), with_kwargs=True)
