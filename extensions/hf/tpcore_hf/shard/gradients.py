"""What ranks of one tp group have alike in their first backwards, and what none has alike; ValueError otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.layers.sharding import Sharding, sharding

from ..plan.rules import wildcard

_BACKWARDS = 2
_WAVES = 4
_SAMPLE = 1 << 16
_APART, _NOISE = 1e-2, 1e-6
"""How far projections of one gradient on two ranks may be apart, relative to its norm and to the largest one's: a
kernel that adds in any order makes a smaller difference, a sum over other tokens or features a larger one."""


def _digest(t: Tensor) -> Tensor:
    """Of a sample of the entries of ``t``: the norm, whether they differ, and the projections onto some waves."""
    flat = t.detach().reshape(-1)[:: t.numel() // _SAMPLE | 1]
    flat = flat.float() if flat.itemsize < 4 else flat
    at = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
    waves = ((flat * (at * (1 + i)).cos()).sum() for i in range(_WAVES))
    return torch.stack([flat.norm(), (flat != flat[:1]).any(), *waves]).float()


def _chosen(names: Iterable[str], which: Tensor) -> str:
    return ", ".join(
        dict.fromkeys(wildcard(n) for n, is_chosen in zip(names, which.tolist(), strict=True) if is_chosen)
    )


@dataclass(eq=False)
class FirstBackwards:
    """The first gradients of a model's whole parameters, which are alike on all ranks of ``comm``, and the values of
    the sharded ones, which are not."""

    comm: Comm
    left: int = _BACKWARDS
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, Tensor] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        for name, p in model.named_parameters() if self.comm.size > 1 and self.comm.eager else ():
            mark = sharding(p)
            if mark is not None and self._differs(mark):
                self.parts[name] = p
            elif p.requires_grad and (mark is None or not mark.axes):
                self.hooks.append(p.register_post_accumulate_grad_hook(partial(self.note, name)))

    def _differs(self, mark: Sharding) -> bool:
        """Whether each rank of ``comm`` has other entries."""
        members = self.comm.transport.members
        return len({str([*mark.layout.boxes(rank, mark.ctx.mesh)]) for rank in members}) == len(members)

    def note(self, name: str, p: Tensor) -> None:
        """A hook of a whole parameter: take its gradient, which is compared when this backward ends."""
        if p.grad is None or p.grad.is_sparse or p.is_meta or torch.compiler.is_compiling():
            return
        if not self.gradients:
            torch.autograd.Variable._execution_engine.queue_callback(self.compare)
        self.gradients[name] = _digest(p.grad)

    def compare(self) -> None:
        """Collective over ``comm``, each of whose ranks ends this backward."""
        whole = dict(sorted(self.gradients.items()))
        parts = {name: _digest(p) for name, p in self.parts.items() if not p.is_meta and p.is_floating_point()}
        self.left, self.gradients, self.parts = self.left - 1, {}, {}
        for hook in self.hooks if self.left == 0 else ():
            hook.remove()
        ranks = self.comm.all_gather(torch.stack([*whole.values(), *parts.values()])[None], 0)
        norms, waves = ranks[:, : len(whole), 0].amax(0), ranks[:, :, 2:]
        apart = (waves[1:] - waves[:1]).abs().amax((0, 2))
        wrong = apart[: len(whole)] > _APART * norms + _NOISE * norms.max()
        if different := _chosen(whole, wrong):
            raise ValueError(
                f"the gradient of {different}, whole on each tp rank, differs between them: ranks have other "
                "batches or draw other random numbers, or it is used where each rank has a part, of the features or "
                "with sequence_parallel of the tokens: there give its module the style 'replicated_with_grad_allreduce'"
            )
        alike = (apart == 0)[len(whole) :] & (ranks[0, len(whole) :, 1] > 0)
        if same := _chosen(parts, alike):
            raise ValueError(
                f"the ranks' parts of {same} have the same values: something filled the part of each as if "
                "it were the whole: tpcore.init_weights gives parts of new values, and functions of torch.nn.init do"
            )
