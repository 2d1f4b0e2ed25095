"""The Trainer of transformers for a cut model: what only the mesh knows, in one override each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ...layers.module import move_model_to_device
from ...runtime.context import current
from ...runtime.random import draw, mixed, seeded
from ...train.pipeline import PipelinedLayers
from ..accelerate import Accelerator
from ..accelerate.state import name_parameters, over_dp
from .checks import check_arguments, check_cut
from .files import load_model, load_state, of_other_ranks, save_state, saved, whole_state
from .mesh import AUTO, choose_mesh


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for a model that ``tpcore.parallelize`` has cut over tp and pipeline stages.

    Call ``tpcore.init`` and ``tpcore.parallelize`` first; arguments are those of transformers' class and of
    its ``TrainingArguments``. Losses, metrics and logs are those of the whole model in one process;
    ``per_device_train_batch_size`` counts for each data-parallel rank. Checkpoints hold the whole model, as
    ``from_pretrained`` opens it, and the optimizer's state, which any other mesh may resume.

    ``zero1``: the optimizer that the arguments name becomes a ``tpcore.Zero1`` over it; options of
    ``tpcore.Zero1`` may be given as a dict. ``mesh``: "auto", or a dict of options of ``tpcore.plan`` (``machine``,
    ``seq_len``, ``memory``): the mesh that is predicted to be the fastest, after ``tpcore.init()`` without degrees, for
    a model that is whole. It decides about microbatches, recomputation, and Zero1 where ``zero1`` does not.

    ValueError for a model that is whole on ranks of one tp group, and for arguments that another kind of parallelism
    would need.
    """

    model: Any
    _whole: dict[str, Tensor] | None = None
    """All values of the model while it is saved, where it does not save itself."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        zero1: bool | dict[str, Any] = False,
        mesh: str | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if mesh is not None:
            if isinstance(mesh, str) and mesh != AUTO:
                raise ValueError(f"mesh must be {AUTO!r} or a dict of options of tpcore.plan, not {mesh!r}")
            if model is None or args is None:
                raise ValueError(f"mesh={mesh!r} needs model= and args=")
            choice = choose_mesh(model, args, {} if isinstance(mesh, str) else mesh)
            zero1 = zero1 or choice.zero1
        self._zero1 = {} if zero1 is True else zero1
        super().__init__(model, args, *more, **kwargs)
        check_arguments(self.args)
        check_cut(self.model)
        _fit_microbatches(self.model)

    # -- who is who ---------------------------------------------------------------------------------------
    def create_accelerator_and_postprocess(self) -> None:
        """Batches, gathers and gradients by the mesh."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator.of(self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples of one optimizer step: all ranks but those of dp share theirs."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * current().batch.size)

    def get_tp_size(self) -> int:
        """What divides the number of tokens of all ranks, and the factor of the loss.

        The factor is the number of data-parallel ranks, right for a loss that is divided by the number of
        tokens and wrong for a mean over the rank's own batch, such as T5's or BERT's. Divided by that number
        the former is a rank's share of the tokens and the latter 1, which is right for both.
        """
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        move_model_to_device(model, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A step in which dropout draws other numbers on each dp rank. All ranks begin with one seed; what
        else draws, such as a sampler, goes on alike on all of them."""
        ctx = current()
        if ctx.data.size == 1:
            return super().training_step(model, inputs, num_items_in_batch)
        with seeded(mixed(draw(), ctx.index(ctx.data))):
            return super().training_step(model, inputs, num_items_in_batch)

    # -- the optimizer --------------------------------------------------------------------------------------
    def create_optimizer(self, model: Any = None) -> Any:
        """The one that the arguments name; by the names of its parameters any mesh loads its state."""
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        name_parameters(optimizer, self.model)
        if self._zero1 is not False and not given:
            self.optimizer = over_dp(optimizer, **(self._zero1 or {}))
        return self.optimizer

    # -- files: whole weights for from_pretrained, the optimizer's state in parts ---------------------------
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; called on all ranks. Before 5.23 transformers has rank 0 alone enter ``_save``."""
        where = str(self.args.output_dir if output_dir is None else output_dir)
        self._whole = whole_state(self.model)
        try:
            with saved(self.model, lambda: self.save_weights(where)):
                super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def save_weights(self, where: str) -> None:
        """Write a cut model into the directory ``where``. Called on all ranks."""
        self.model.save_pretrained(where)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        background = getattr(self.args, "async_save", False)
        save_state(output_dir, self.optimizer, self.lr_scheduler, in_background=background)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_state(checkpoint, self.optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_model(self.model if model is None else model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None:
            load_model(self.model, best)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore each rank's random state. If the run had another number of ranks, seed all ranks alike."""
        if checkpoint is not None and of_other_ranks(checkpoint):
            transformers.set_seed(self.args.seed + self.state.global_step)
        else:
            super()._load_rng_state(checkpoint)


@dataclass(frozen=True)
class _FitMicrobatches:
    """A hook that cuts a batch into as many microbatches as divide it, at most ``most``."""

    most: int

    def __call__(self, layers: PipelinedLayers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        layers.num_microbatches = math.gcd(len(hidden), self.most)


def _fit_microbatches(model: nn.Module) -> None:
    """Let a batch that the number of microbatches does not divide go through in fewer."""
    for module in model.modules():
        if isinstance(module, PipelinedLayers) and not module._forward_pre_hooks:
            module.register_forward_pre_hook(_FitMicrobatches(module.num_microbatches), with_kwargs=True)
