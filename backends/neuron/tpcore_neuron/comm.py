"""The collectives of one group, on torch_xla. Imported only when one is made, for it claims the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpcore.backend.capabilities import Capabilities
from tpcore.comm import Comm, Op
from tpcore.mesh import Group

DTYPES = Capabilities().dtypes


class XlaComm(Comm):
    """Every call names all groups of the partition, and none pins a layout: so the program is the same on
    every rank. (Unless told not to pin, ``xm.all_gather`` pads by the rank and all-reduces.)

    torch_xla chains the collectives of a step by a number, its token, that each adds to its input: order for
    ranks whose programs differ. Here they do not, and the chain does harm: an infinity in one result is NaN
    in all that come after, and once a value is read, all collectives before it run again in the next program,
    which is then another one. So every collective here ends the chain."""

    eager = False

    def __init__(self, group: Group, position: int, process_group: Any) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        self._xla, self._xm = torch_xla._XLAC, xm
        # one element and moved: torch_xla folds 0-d zeros and ones, and fills, into the program
        super().__init__(group, torch.tensor([position]).to(torch_xla.device()))
        self._groups = group.as_list()
        self._device = self.position.device
        self._pg = process_group

    @property
    def process_group(self) -> Any:
        """A ``torch.distributed`` group of the xla backend that knows all groups of the partition."""
        return self._pg

    def _all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        x = self._checked(x, f"all_reduce {op}", sums=True)
        if x.numel() == 0:
            return x.clone()
        if x.dtype is torch.bool:  # of bits the sum is "any", and so is the maximum
            return self._reduced(x.to(torch.int32), "max").to(torch.bool)
        return self._reduced(x, op)

    def _reduced(self, x: Tensor, op: Op) -> Tensor:
        # xm.REDUCE_SUM and xm.REDUCE_MAX are the same two words
        return self._unchained(self._xm.all_reduce(op, x, groups=self._groups, pin_layout=False))

    def _all_gather(self, x: Tensor, dim: int) -> Tensor:
        x = self._checked(x, f"all_gather dim {dim}")
        if x.numel() == 0:
            return torch.cat([x] * self.size, dim)
        wide = x.to(torch.int32) if x.dtype is torch.bool else x
        out = self._unchained(self._xm.all_gather(wide, dim=dim, groups=self._groups, pin_layout=False))
        return out.to(x.dtype)

    def _reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        x = self._checked(x, f"reduce_scatter dim {dim}", sums=True)
        if x.numel() == 0:
            return x.narrow(dim, 0, self.chunk(x, dim)).clone()
        out = self._xm.reduce_scatter(
            self._xm.REDUCE_SUM,
            x,
            scale=1.0,
            scatter_dim=dim,
            shard_count=self.size,
            groups=self._groups,
            pin_layout=False,
        )
        return self._unchained(out)

    def _unchained(self, result: Tensor) -> Tensor:
        self._xla._set_all_reduce_token(str(self._device), None)
        return result

    def _checked(self, x: Tensor, what: str, sums: bool = False) -> Tensor:
        """``x`` without its autograd graph, which XLA's collectives would carry on, or cut without a word."""
        if x.device != self._device:
            raise ValueError(
                f"{what} over {self.group.axes}: a tensor of shape {tuple(x.shape)} is on {x.device}, and "
                f"this rank's device is {self._device}: move it with .to(tpcore.current().device)"
            )
        if sums and x.dtype not in DTYPES:
            raise ValueError(f"cannot take the {what} of {x.dtype}: convert it to a wider dtype first")
        return x.detach()

    # -- beyond Comm: what XLA can do and tensor parallelism does not need ------------------------------
    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        """Chunk ``i`` of ``x`` along ``split_dim`` goes to member ``i``; the received ones are concatenated
        along ``concat_dim``, in rank order."""
        x = self._checked(x, "all_to_all")
        split_dim, concat_dim = split_dim % x.ndim, concat_dim % x.ndim
        self.chunk(x, split_dim)
        if self.size == 1:
            return x
        out = self._xm.all_to_all(x, split_dim, concat_dim, self.size, groups=self._groups, pin_layout=False)
        return self._unchained(out)

    def permute(self, x: Tensor, to: Sequence[int]) -> Tensor:
        """Member ``i`` sends ``x`` to member ``to[i]``; one who is sent nothing gets zeros."""
        x = self._checked(x, "permute")
        if len(to) != self.size or len(set(to)) != self.size or not set(to) <= set(range(self.size)):
            raise ValueError(f"to={list(to)} does not order the {self.size} members of {self.group.axes}")
        pairs = [[ranks[i], ranks[to[i]]] for ranks in self._groups for i in range(self.size)]
        return self._unchained(self._xm.collective_permute(x, pairs))
