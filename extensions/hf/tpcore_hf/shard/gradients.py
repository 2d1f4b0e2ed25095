"""What ranks of one tp group have alike in their first forwards, backwards and steps, and what none has; ValueError if
not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.layers.sharding import Sharding, sharding
from tpcore.private import backward_number, recorded, when_backward_ends
from tpcore.runtime.context import current
from tpcore.runtime.digests import compare_inputs
from tpcore.train.alike import are_other, gathered, projections

from ..plan.inputs import named
from ..plan.rules import wildcard

_BACKWARDS = _STEPS = 2
_FEW, _NOISE = 1 << 12, 1e-6
_SCALED = 1e-4
"""How far the norm of all whole gradients together may be apart, relative to it, where an optimizer steps: what
backward gave alike is scaled by one number on all ranks."""


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
        steps = FirstSteps(comm, ref(base))
        steps.watch()
        FirstBackwards(comm, steps).watch(base)


@dataclass(eq=False)
class FirstBackwards:
    """The first gradients of a model's whole parameters, which are alike on all ranks of ``comm``, as their values are
    before ``steps``, and the values of the sharded ones, which are not."""

    comm: Comm
    steps: FirstSteps
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
                    self.parts[name] = p, None if p.is_meta else projections(p, _FEW)
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
        self.gradients[backward][name] = torch.stack([projections(p.grad), projections(p)])
        self.noise = max(self.noise, torch.finfo(p.grad.dtype).eps)

    def compare(self, backward: int) -> None:
        """Collective over ``comm``, each of whose ranks ends this backward."""
        whole = dict(sorted(self.gradients.pop(backward).items()))
        parts = {name: projections(p, _FEW) for name, (p, _) in self.parts.items() if not p.is_meta}
        for name, now in parts.items():
            first = self.parts[name][1]
            now[1] *= first is None or not torch.equal(first.to(now.device), now)
        self.left, self.parts = self.left - 1, {}
        for hook in self.hooks if self.left == 0 else ():
            hook.remove()
        given = [*(t[0] for t in whole.values()), *(t[1] for t in whole.values()), *parts.values()]
        n, (apart, norms, varied) = len(whole), gathered(given, self.comm)
        # a kernel's noise may turn around what an optimizer makes of a gradient near zero
        other = (apart > _NOISE * norms)[n : 2 * n] & (self.steps.left == _STEPS)
        if different := _chosen(whole, other):
            raise ValueError(
                f"{different}, whole on each tp rank, has other values on them: ranks were built with other seeds, or "
                "changed it by a number that each takes of its parts of parameters or gradients, as "
                "sum(p.grad.norm() ** 2 ...), which is no number of the model: tpcore.clip_grad_norm returns the whole "
                "norm, and tpcore.init_weights gives values"
            )
        if different := _chosen(whole, are_other(apart[:n], norms[:n], self.noise)):
            raise ValueError(
                f"the gradient of {different}, whole on each tp rank, differs between them: ranks have other "
                "batches or draw other random numbers, or it is used where each rank has a part, of the features or "
                "with sequence_parallel of the tokens: there give its module the style 'replicated_with_grad_allreduce'"
            )
        alike = (apart == 0)[2 * n :] & varied[2 * n :]
        if same := _chosen(parts, alike):
            raise ValueError(
                f"the ranks' parts of {same} have the same values: something filled the part of each as if "
                "it were the whole: tpcore.init_weights gives parts of new values, and functions of torch.nn.init do"
            )


@dataclass(eq=False)
class FirstSteps:
    """The gradients of a model's whole parameters where its first optimizers step: backward gave them alike."""

    comm: Comm
    model: ref[nn.Module]  # and none of a parameter, which torch then could not swap
    left: int = _STEPS

    def watch(self) -> None:
        """Until then the rank's context has this."""
        if self.comm.eager:
            current().before_steps.append(self.compare)

    def compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective over ``comm``, whose ranks all step."""
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = self.model()
        marks = ((p, sharding(p)) for p in (() if model is None else model.parameters()) if id(p) in stepped)
        whole = [p.grad for p, mark in marks if mark is None or not mark.axes]
        gradients = [g for g in whole if g is not None and g.is_floating_point() and not g.is_sparse]
        self.left -= bool(gradients)
        if model is None or not self.left:
            current().before_steps.remove(self.compare)
        if not gradients or recorded(*gradients):
            return
        device = self.comm.position.device
        total = torch.stack([g.detach().float().norm().to(device) for g in gradients]).norm().reshape(1)
        norms = self.comm.all_gather(total, 0)
        coarsest = max(torch.finfo(g.dtype).eps for g in gradients)
        # a rank's infinity is for the optimizer, or its scaler, to skip
        if bool(norms.isfinite().all()) and norms.max() - norms.min() > max(_SCALED, coarsest / 2) * norms.max():
            raise ValueError(
                f"{type(optimizer).__name__} steps by gradients that backward gave alike on all tp ranks, and "
                f"that differ now: their norms are {', '.join(f'{n:.6g}' for n in norms.tolist())}. A number that each "
                "rank takes of its parts of parameters or gradients, as sum(p.grad.norm() ** 2 ...), is no number of "
                "the model: tpcore.clip_grad_norm(model, max_norm) clips by the norm of the whole, and returns it"
            )
