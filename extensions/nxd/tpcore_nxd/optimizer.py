"""ZeRO-1 under its published name, which clips inside its step. New code uses ``tpcore.Zero1``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tpcore import checkpoint
from tpcore.layout.mesh import DATA
from tpcore.runtime.context import current
from tpcore.train.clip import check_max_norm, scale_to
from tpcore.train.parameters import named_of
from tpcore.train.zero import Zero1

from .paths import mirror
from .utils import loss_of_closure

Groups = list[list[int]]

_NEEDS_NOTHING = ("pin_layout", "coalesce_cc", "lazy_init", "save_master_weights", "use_world_for_grad_norm")
"""About XLA's collectives, and about what is done here in any case."""


class NeuronZero1Optimizer(Zero1):
    """``tpcore.Zero1`` whose ``step()`` does all: the mean over dp, clipping, the step, the new weights.

    ``grad_clipping`` is on and ``max_norm`` is 1.0, as published. After a step ``grad_norm`` is the norm before
    clipping. ``optimizer_dtype``: of the master weights, float32 by default. ``use_grad_acc_hook`` or
    ``higher_cc_precision``: gradients are summed and sent in float32. ``sharding_groups`` and ``grad_norm_groups`` have
    to be the dp and the tp groups, as they are without. ``tpcore.optimizer_step`` takes it as any ``Zero1``, and clips
    by its own ``max_norm``. Gradients stay in ``.grad``, as backward left them, until ``zero_grad``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        *,
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        sharding_groups: Groups | None = None,
        grad_norm_groups: Groups | None = None,
        use_grad_acc_hook: bool = False,
        higher_cc_precision: bool = False,
        bucket_cap_mb_reduce_scatter: float = 4,
        bucket_cap_mb_all_gather: float | None = None,
        **options: Any,
    ) -> None:
        _check_groups("sharding_groups", sharding_groups, *DATA)
        _check_groups("grad_norm_groups", grad_norm_groups, "tp")
        self._max_norm = (1.0 if max_norm is None else float(max_norm)) if grad_clipping else None
        if self._max_norm is not None:
            check_max_norm(self._max_norm)
        self._used: dict[Tensor, tuple[Tensor, int]] = {}
        parameters = list(params)
        groups = parameters if parameters and isinstance(parameters[0], dict) else [{"params": parameters}]
        flat = (p for group in groups for p in named_of(group)[0])  # which makes lists of generators
        half = any(isinstance(p, Tensor) and p.dtype.itemsize < 4 for p in flat)
        super().__init__(
            optimizer_class,
            parameters,
            master_dtype=optimizer_dtype or torch.float32,
            # of float32 parameters .grad is that already, and scripts read it there
            grad_dtype=torch.float32 if half and (use_grad_acc_hook or higher_cc_precision) else None,
            bucket_mb=max(bucket_cap_mb_reduce_scatter, bucket_cap_mb_all_gather or 0),
            **{name: value for name, value in options.items() if name not in _NEEDS_NOTHING},
        )

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's chunks, whose groups have one for each parameter, in order. A
        chunk has its gradient between the mean and the step only; ``grad_norm`` is their norm."""
        return self.base()

    def reduce_gradients(self) -> None:
        if self.reduced:
            return
        grads = {p: p.grad for p in self._parameters if p.grad is not None}
        super().reduce_gradients()
        for p, grad in grads.items():
            p.grad = grad
        self._used = {p: (grad, grad._version) for p, grad in grads.items()}

    def _in_step(self) -> bool:
        """Like ``Zero1._in_step``: a gradient that is left over from a step does not wait for one."""
        left = {p: g for p, (g, version) in self._used.items() if p.grad is g and g._version == version}
        for p in left:
            p.grad = None
        try:
            return super()._in_step()
        finally:
            for p, grad in left.items():
                p.grad = grad

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = loss_of_closure(closure)
        if not self.reduced and self._max_norm is not None:
            self.reduce_gradients()
            self.grad_norm = self.norm()
            scale_to(self.gradients(), self.grad_norm, self._max_norm)
        super().step()
        return loss

    def init_zero(self) -> None:
        """Nothing: scripts call it after they have loaded weights, and a step finds new weights by itself."""

    def save_sharded_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        """Save this optimizer alone, as the checkpoint ``output_dir``. Each rank writes its share at once, so
        ``num_workers_per_step`` changes nothing."""
        checkpoint.save({"optimizer": self}, output_dir)

    def load_sharded_state_dict(self, output_dir: str, num_workers_per_step: int = 8) -> None:
        checkpoint.load(output_dir, self, model_key="optimizer")


NeuronEPZero1Optimizer = ZeroRedundancyOptimizer = NeuronZero1Optimizer
"""Other names, one of torch_xla: experts, by marks or layers, are stepped over the dp ranks that have the same ones."""


def _check_groups(name: str, groups: Groups | None, *names: str) -> None:
    axes = current().mesh.present(names)
    want = current().mesh.group(*axes).as_list()
    if groups is not None and sorted(map(sorted, groups)) != sorted(map(sorted, want)):
        raise ValueError(
            f"NeuronZero1Optimizer({name}={groups}): state is sharded over dp, ep and cp, and norms are summed over "
            f"what shards a parameter; only the {', '.join(axes)} groups, {want}, say that, and so does leaving it out"
        )


mirror(__name__, "optimizer.zero_redundancy_optimizer")
