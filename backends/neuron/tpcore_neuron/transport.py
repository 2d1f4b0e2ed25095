"""The collectives of one group, on torch_xla, which is imported only here, because that claims the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tpcore.comm.transport import PRIMITIVES, Op, Transport
from tpcore.layout.mesh import Group

from .settings import PAIRS


class XlaTransport(Transport):
    """Every call names all groups of the partition and pins no layout, so the program is the same on every rank.
    (With a pinned layout ``xm.all_gather`` pads by the rank and all-reduces.) Every collective ends torch_xla's
    chain, a token that orders ranks whose programs differ: with it an infinity in one result makes all later ones
    NaN, and after a read all earlier collectives run again in the next program, which thereby changes."""

    eager = False

    def __init__(self, group: Group, rank: int, process_group: Any) -> None:
        import torch_xla
        import torch_xla.core.xla_model as xm

        self._xla, self._xm = torch_xla._XLAC, xm
        super().__init__(group, rank, torch_xla.device())
        self._groups = group.as_list()
        self._over = {"groups": self._groups, "pin_layout": False}
        self._device = self.position.device
        self._pg = process_group
        self._pairwise = PAIRS.get()

    @property
    def process_group(self) -> Any:
        """A ``torch.distributed`` group of the xla backend that has all groups of the partition."""
        return self._pg

    def all_reduce(self, x: Tensor, op: Op, donate: bool) -> Tensor:
        # xm.REDUCE_SUM and xm.REDUCE_MAX are "sum" and "max"; the sum of bools is "any", and so is their maximum
        how = "max" if x.dtype is torch.bool else op
        return self._run(x, lambda wide: self._xm.all_reduce(how, wide, **self._over), "all_reduce", op)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._run(x, lambda wide: self._xm.all_gather(wide, dim=dim, **self._over), "all_gather", dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        how = {"scale": 1.0, "scatter_dim": dim, "shard_count": self.size, **self._over}
        return self._run(x, lambda wide: self._xm.reduce_scatter("sum", wide, **how), "reduce_scatter", dim)

    def all_to_all(self, x: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        how = split_dim, concat_dim, self.size
        return self._run(x, lambda wide: self._xm.all_to_all(wide, *how, **self._over), "all_to_all", *how[:2])

    def _run(self, x: Tensor, call: Callable[[Tensor], Tensor], primitive: str, *arguments: Any) -> Tensor:
        """The result of ``call``, a collective of torch_xla, which takes neither empty tensors nor bools."""
        x = self._checked(x, primitive, *arguments)
        if x.numel() == 0:
            return PRIMITIVES[primitive].result(x, self.size, *arguments)
        return self._unchained(call(_wide(x))).to(x.dtype)

    def _unchained(self, result: Tensor) -> Tensor:
        self._xla._set_all_reduce_token(str(self._device), None)
        return result

    def _checked(self, x: Tensor, primitive: str, *arguments: Any) -> Tensor:
        """``x`` without its autograd graph, which XLA's collectives would continue or silently cut."""
        if x.device != self._device:
            raise ValueError(
                f"{PRIMITIVES[primitive].describe(*arguments)} over {self.group.axes}: a tensor of shape "
                f"{tuple(x.shape)} is on {x.device}, and this "
                f"rank's device is {self._device}: move it with .to(tpcore.current().device)"
            )
        return x.detach()

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """A sum with zeros: it sends less than a gather. The sign of zero is lost, as everywhere here."""
        x = self._checked(x, "broadcast", src)
        # where, not a product: 0 * nan is nan
        contribution = torch.where(self.position == src, x, torch.zeros_like(x)).reshape(x.shape)
        return self.all_reduce(contribution, "sum", True)

    def permute(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        x = self._checked(x, "permute", to)
        if self._pairwise and x.numel():
            return self._by_pairs(x, to)
        pairs = [[ranks[i], ranks[j]] for ranks in self._groups for i, j in enumerate(to) if j >= 0]
        if not pairs:
            return torch.zeros_like(x)
        return self._run(x, lambda wide: self._xm.collective_permute(wide, pairs), "permute", to)

    def _by_pairs(self, x: Tensor, to: tuple[int, ...]) -> Tensor:
        """A permute for compilers without it: gathers over pairs of ranks. A group of odd size has no such pairs."""
        if self.size % 2:
            return super().permute(x, to)
        stays = self._own_entry([int(i == j) for i, j in enumerate(to)])
        out = torch.where(stays == 1, x, torch.zeros_like(x))
        for sends, pairs in rounds(to):
            groups = [[ranks[i], ranks[j]] for ranks in self._groups for i, j in pairs]
            both = self._unchained(self._xm.all_gather(_wide(x).unsqueeze(0), dim=0, groups=groups, pin_layout=False))
            firsts, targets = {i for i, _ in pairs}, {j for _, j in sends}
            partner = self._own_entry([int(r in firsts) for r in range(self.size)])
            receives = self._own_entry([int(r in targets) for r in range(self.size)])
            received = both.index_select(0, partner)[0].to(x.dtype)
            out = torch.where(receives == 1, received, out)
        return out

    def _own_entry(self, every: list[int]) -> Tensor:
        """This rank's entry of a table of all positions, as a tensor."""
        return torch.tensor(every).to(self._device).index_select(0, self.position)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.int32) if x.dtype is torch.bool else x


Pairs = list[tuple[int, int]]


def rounds(to: Sequence[int]) -> Iterator[tuple[Pairs, Pairs]]:
    """For each round: the sends (from, to), with no position twice; and all positions in pairs, the sends' first."""
    left = [(i, j) for i, j in enumerate(to) if j not in (i, -1)]
    while left:
        sends: Pairs = []
        for i, j in left:
            if not {i, j} & {r for pair in sends for r in pair}:
                sends.append((i, j))
        left = [edge for edge in left if edge not in sends]
        idle = [r for r in range(len(to)) if r not in {r for pair in sends for r in pair}]
        yield sends, [*sends, *zip(idle[::2], idle[1::2], strict=True)]
