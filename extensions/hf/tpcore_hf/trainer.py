"""The Trainer of transformers for a sharded model: what only the mesh knows, in one override each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.errors import extra
from tpcore.private import forward_pre_hooks

with extra("trainer", __name__):
    import transformers

from tpcore.layers.module import move_model_to_device
from tpcore.runtime.consensus import gather
from tpcore.runtime.context import current
from tpcore.runtime.random import mixed, seeded
from tpcore.train.muon import Muon
from tpcore.train.parameters import name_parameters
from tpcore.train.pipeline import PipelinedLayers
from tpcore.train.preemption import Preemption
from tpcore.train.zero import Zero1

from .accelerate import Accelerator
from .batches import in_runs
from .choice import AUTO, choose_mesh
from .model_files import is_sharded, load_model, load_state, of_other_ranks, save_state, saved, whole_state
from .preemption import SaveOnPreemption, own_preemption
from .shard.figures import parameter_count

__all__ = ["Trainer"]

# its loop has no method to ask
vars(transformers.trainer)["get_model_param_count"] = parameter_count
vars(transformers.trainer_pt_utils)["get_model_param_count"] = parameter_count


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for a model that ``tpcore.parallelize`` has sharded over tp and pipeline stages.

    Call ``tpcore.init`` and ``tpcore.parallelize`` first. Losses, metrics and logs are those of the whole model in one
    process; ``per_device_train_batch_size`` counts for each data-parallel rank. Checkpoints hold the whole model, as
    ``from_pretrained`` opens it, and the optimizer's state, which any other mesh may resume.

    Args:
        model: sharded, or with ``mesh`` whole.
        args: ``TrainingArguments`` of transformers.
        more: other arguments of transformers' class, by position.
        zero1: the optimizer that the arguments name becomes a ``tpcore.Zero1`` over it; options of ``tpcore.Zero1`` may
            be given as a dict.
        mesh: "auto", or a dict of options of ``tpcore.plan`` (``machine``, ``seq_len``, ``memory``): the mesh that is
            predicted to be the fastest, after ``tpcore.init()`` without degrees. It decides about microbatches,
            recomputation, and Zero1 where ``zero1`` does not.
        kwargs: other arguments of transformers' class, by name.

    Raises:
        ValueError: for a model that is whole on ranks of one tp group, and for arguments that another kind of
            parallelism would need.
    """

    model: Any
    _whole: dict[str, Tensor] | None = None
    """All values of the model while it is saved, where it does not save itself."""
    _micro_step = (-1, 0)
    """The last step, and which of its batches."""
    _preemption: Preemption | None = None

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
        with own_preemption(args) as saves_on_signal:
            if more:
                super().__init__(model, args, *more, **kwargs)
            else:  # by name, for TRL's have other arguments between these two
                super().__init__(model=model, args=args, **kwargs)
        if saves_on_signal:
            self._preemption = Preemption()
            self.add_callback(SaveOnPreemption(self._preemption))
        check_arguments(self.args)
        check_sharded(self.model)
        for module in self.model.modules():
            if isinstance(module, PipelinedLayers) and not forward_pre_hooks(module):
                module.register_forward_pre_hook(partial(_fit, module.num_microbatches), with_kwargs=True)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: Any = None) -> Any:
        """Signals are noted until it ends, also by an error."""
        with self._preemption or nullcontext():
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    # -- who is who ---------------------------------------------------------------------------------------
    def create_accelerator_and_postprocess(self) -> None:
        """Batches, gathers and gradients by the mesh."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator.of(self.accelerator)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_train_dataloader(self) -> Any:
        """Batches of a step in runs, where bits are to be equal at every dp."""
        return in_runs(super().get_train_dataloader(), self.args.gradient_accumulation_steps)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Examples of one optimizer step: all ranks but those of dp share theirs."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * current().batch.size)

    def get_tp_size(self) -> int:
        """What divides the number of tokens of all ranks, and the factor of the loss: the number of data-parallel ranks
        is right for a loss divided by the number of tokens, and divided out for a mean over the rank's own batch."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    def store_flos(self) -> None:
        """Those of all batches: the ranks of one batch have counted the same."""
        self.state.total_flos += sum(gather(self.current_flos, current().batch))
        self.current_flos = 0

    def get_num_trainable_parameters(self) -> int:
        """Of the whole model."""
        count = getattr(self.model, "num_parameters", None)
        return super().get_num_trainable_parameters() if count is None else int(count(only_trainable=True))

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        move_model_to_device(model, device)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A step in which dropout draws other numbers on each dp rank; what else draws, a sampler say, draws alike, as
        in one process."""
        ctx, (step, number) = current(), self._micro_step
        number = number + 1 if step == self.state.global_step else 0
        self._micro_step = self.state.global_step, number
        rank, alone = ctx.index(ctx.data), ctx.data.size * ctx.mesh.axes.get("pp", 1) == 1
        if ctx.reproducible is not None:  # what one rank of dp draws for this batch
            number, rank, alone = rank * self.current_gradient_accumulation_steps + number, 0, False
        with nullcontext() if alone else seeded(mixed(self.args.seed, self.state.global_step, number, rank)):
            return super().training_step(model, inputs, num_items_in_batch)

    # -- the optimizer --------------------------------------------------------------------------------------
    def create_optimizer(self, model: Any = None) -> Any:
        """The one that the arguments name; by the names of its parameters any mesh loads its state."""
        supplied = self.optimizer is not None
        kind, options = self.optimizer_cls_and_kwargs or (None, {})
        if isinstance(kind, type) and issubclass(kind, Muon) and not supplied:
            # by names, which transformers' groups lack
            named = [(n, p) for n, p in (model or self.model).named_parameters() if p.requires_grad]
            self.optimizer = kind(named, **{"lr": self.args.learning_rate, **options})
        optimizer = super().create_optimizer(model)
        name_parameters(optimizer, self.model)
        if self._zero1 is not False and not supplied:
            self.optimizer = over_dp(optimizer, **(self._zero1 or {}))
        return self.optimizer

    # -- files: whole weights for from_pretrained, the optimizer's state in parts ---------------------------
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; called on all ranks."""
        where = str(self.args.output_dir if output_dir is None else output_dir)
        self._whole = whole_state(self.model)
        try:
            with saved(self.model, lambda: self.save_weights(where)):
                super().save_model(output_dir, _internal_call)
        finally:
            self._whole = None

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, self._whole if state_dict is None else state_dict)

    def save_weights(self, where: str) -> None:
        """Write a sharded model into the directory ``where``. Called on all ranks."""
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


def _fit(most: int, layers: PipelinedLayers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that cuts a batch into as many microbatches as divide it, at most ``most``."""
    hidden = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
    layers.num_microbatches = math.gcd(len(hidden), most)


def over_dp(optimizer: Any, **options: Any) -> Zero1:
    """A ``Zero1`` that steps as ``optimizer`` would, which has no state yet; ``options``: its own."""
    kind = type(optimizer)
    if optimizer.state:
        raise ValueError(f"this {kind.__name__} has stepped already: ZeRO-1 begins before the first step")
    parameters = inspect.signature(kind).parameters

    def arguments(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if key in parameters and key != "params"}

    groups = []
    for group in optimizer.param_groups:
        names = group.get("param_names")
        params = group["params"] if names is None else list(zip(names, group["params"], strict=True))
        # torch takes a group without parameters for one without names
        named: dict[str, Any] = {} if names is None or params else {"param_names": []}
        groups.append({**arguments(group), "params": params, **named})
    zero1 = Zero1(kind, groups, **options, **arguments(optimizer.defaults))
    for zero1_group, group in zip(zero1.param_groups, optimizer.param_groups, strict=True):
        zero1_group.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
    # a scheduler that was made for `optimizer` goes on by these groups, and asks whether that has stepped
    optimizer.param_groups = zero1.param_groups
    optimizer._opt_called = True
    return zero1


# -- what would be wrong on a mesh ------------------------------------------------------------------------
_REFUSED = {
    "train_sampling_strategy": ("batch_rebalance", "it deals batches to all ranks of the world"),
    "eval_use_gather_object": (True, "it gathers from ranks that hold the same batch"),
    "save_on_each_node": (True, "rank 0 writes the whole model: use a directory that all hosts see"),
    "torch_compile_backend": ("openxla", "it compiles one replica alone"),
}
_OTHERS = ("fsdp", "deepspeed")
"""Arguments that name another library of sharding. accelerate ignores the first on CPUs."""


def check_arguments(args: Any) -> None:
    """ValueError for training arguments that take each process for a data-parallel rank."""
    mesh = current().mesh
    for name in _OTHERS if mesh.size > 1 else ():
        if option := getattr(args, name, None):
            raise ValueError(
                f"TrainingArguments({name}={option!r}) on the mesh {dict(mesh.axes)}: two libraries would cut "
                "one model; drop it, and ask for zero1=True to cut the optimizer's state"
            )
    if mesh.size == current().batch.size:
        return
    for name, (value, why) in _REFUSED.items():
        if getattr(args, name, None) == value:
            raise ValueError(f"TrainingArguments({name}={value!r}) on the mesh {dict(mesh.axes)}: {why}")


def check_sharded(model: nn.Module) -> None:
    """ValueError for a model of which all ranks of a tp group would train the same copy."""
    mesh = current().mesh
    if mesh.size != current().batch.size and not is_sharded(model):
        raise ValueError(
            f"this {type(model).__name__} is whole on every rank of the mesh {dict(mesh.axes)}: call "
            "tpcore.parallelize(model) before the Trainer, or tpcore.init with tp=1"
        )
