"""What ranks of one tp group have alike in their first forwards and backwards, and what none has; ValueError if not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.layers.sharding import Sharding, sharding
from tpcore.private import backward_number, recorded, when_backward_ends
from tpcore.runtime.digests import compare_inputs

from ..plan.inputs import named
from ..plan.rules import wildcard

_BACKWARDS = 2
_WAVES = 4
_SAMPLE, _FEW = 1 << 16, 1 << 12
_APART, _NOISE = 1e-2, 1e-6
"""How far projections of one gradient on two ranks may be apart, relative to its norm and to the largest one's: a
kernel that adds in any order makes a smaller difference, a sum over other tokens or features a larger one."""


def _digest(t: Tensor, sample: int = _SAMPLE) -> Tensor:
    """Of a sample of the entries of ``t``: the norm, whether they differ, and the projections onto some waves."""
    flat = t.detach().reshape(-1)[:: t.numel() // sample | 1]
    flat = flat.float() if flat.itemsize < 4 else flat
    at = torch.arange(1, flat.numel() + 1, device=flat.device, dtype=flat.dtype)
    waves = ((flat * (at * (1 + i)).cos()).sum() for i in range(_WAVES))
    return torch.stack([flat.norm(), (flat != flat[:1]).any(), *waves]).float()


def _chosen(names: Iterable[str], which: Tensor) -> str:
    return ", ".join(
        dict.fromkeys(wildcard(n) for n, is_chosen in zip(names, which.tolist(), strict=True) if is_chosen)
    )


def watch_first(model: nn.Module, base: nn.Module, comm: Comm) -> None:
    """Compare the tensors of which the ranks of ``comm`` make the first forwards of ``model``, and the first gradients
    of ``base``, which may be inside."""

    def before(whose: object, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            given = named(model, args, kwargs) if args else kwargs  # signatures take longer to read
            # not hidden states: torch's pipelines ask a stage for shapes with any memory
            compared = {n: t for n, t in given.items() if isinstance(t, Tensor) and not t.requires_grad}
            compare_inputs(compared, comm, whose)

    if comm.size > 1:
        model.register_forward_pre_hook(partial(before, object()), with_kwargs=True, prepend=True)
        FirstBackwards(comm).watch(base)


@dataclass(eq=False)
class FirstBackwards:
    """The first gradients of a model's whole parameters, which are alike on all ranks of ``comm``, and the values of
    the sharded ones, which are not."""

    comm: Comm
    left: int = _BACKWARDS
    noise: float = _NOISE
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """Of each backward under way: one may run inside another, and one that raised never ends."""
    parts: dict[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """Each with what it was at first: parts that were alike then are a repetition of the model's own."""
    hooks: list[Any] = field(default_factory=list)

    def watch(self, model: nn.Module) -> None:
        if self.comm.size == 1 or not self.comm.eager:
            return
        for name, p in model.named_parameters():
            mark = sharding(p)
            if not p.is_floating_point():
                continue
            if mark is not None and self._differs(mark):
                if p.ndim < 3:  # others are experts, which may begin as copies of one
                    self.parts[name] = p, None if p.is_meta else _digest(p, _FEW)
            elif p.requires_grad and (mark is None or not mark.axes):
                self.hooks.append(p.register_post_accumulate_grad_hook(partial(self.note, name)))
        # what a checkpoint has may be alike too
        self.hooks.append(model.register_load_state_dict_post_hook(lambda *_: self.parts.clear()))

    def _differs(self, mark: Sharding) -> bool:
        """Whether each rank of ``comm`` has other entries."""
        members = self.comm.transport.members
        return len({str([*mark.layout.boxes(rank, mark.ctx.mesh)]) for rank in members}) == len(members)

    def note(self, name: str, p: Tensor) -> None:
        """A hook of a whole parameter: take its gradient, which is compared when this backward ends."""
        if p.grad is None or p.grad.is_sparse or torch.compiler.is_compiling() or recorded(p.grad):
            return
        if (backward := backward_number()) not in self.gradients:
            self.gradients[backward] = {}
            when_backward_ends(partial(self.compare, backward))
        self.gradients[backward][name] = _digest(p.grad)
        self.noise = max(self.noise, torch.finfo(p.grad.dtype).eps)

    def compare(self, backward: int) -> None:
        """Collective over ``comm``, each of whose ranks ends this backward."""
        whole = dict(sorted(self.gradients.pop(backward).items()))
        parts = {name: _digest(p, _FEW) for name, (p, _) in self.parts.items() if not p.is_meta}
        for name, now in parts.items():
            first = self.parts[name][1]
            now[1] *= first is None or not torch.equal(first.to(now.device), now)
        self.left, self.parts = self.left - 1, {}
        for hook in self.hooks if self.left == 0 else ():
            hook.remove()
        device = self.comm.position.device  # parameters may be on several
        ranks = self.comm.all_gather(torch.stack([t.to(device) for t in (*whole.values(), *parts.values())])[None], 0)
        norms, waves = ranks[:, : len(whole), 0].amax(0), ranks[:, :, 2:]
        apart = (waves[1:] - waves[:1]).abs().amax((0, 2))
        wrong = apart[: len(whole)] > _APART * norms + self.noise * norms.max()
        if different := _chosen(whole, wrong):
            raise ValueError(
                f"the gradient of {different}, whole on each tp rank, differs between them: ranks have other "
                "batches or draw other random numbers, or it is used where each rank has a part, of the features or "
                "with sequence_parallel of the tokens: there give its module the style 'replicated_with_grad_allreduce'"
            )
        alike = (apart == 0)[len(whole) :] & (ranks[:, len(whole) :, 1].amax(0) > 0)
        if same := _chosen(parts, alike):
            raise ValueError(
                f"the ranks' parts of {same} have the same values: something filled the part of each as if "
                "it were the whole: tpcore.init_weights gives parts of new values, and functions of torch.nn.init do"
            )
