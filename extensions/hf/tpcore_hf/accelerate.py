"""accelerate on a mesh: batches by data-parallel rank, no wrapper, the norm of the full gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore import checkpoint
from tpcore.errors import CheckpointError, extra

with extra("trainer", __name__):
    import accelerate
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType, recursively_apply

from tpcore.layers.module import move_model_to_device
from tpcore.runtime.context import current
from tpcore.train.clip import check_max_norm, clip_grad_norm, scale_to
from tpcore.train.parameters import name_parameters
from tpcore.train.step import Stepping, stepping_of
from tpcore.train.zero import Zero1, fitted

from .batches import check_in_turn
from .load.gathered import full_state_dict
from .shard.refusals import admit

__all__ = ["Accelerator"]

_OTHERS = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class MeshOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer whose step takes the mean of the gradients over dp, once, before or after clipping."""

    def __init__(self, optimizer: Any) -> None:
        # without placement: that would load the state back, which is collective and changes nothing here
        super().__init__(optimizer, device_placement=False)
        self._reduced: Stepping | Zero1 | None = None

    def reduced(self) -> Stepping | Zero1:
        """The gradients after their mean over dp. Collective the first time after a step."""
        if self._reduced is None:
            self._reduced = stepping_of(self.optimizer)
            self._reduced.reduce_gradients()
        return self._reduced

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("an optimizer over a mesh takes no closure: its gradients would not be reduced")
        if not self.gradient_state.sync_gradients:
            return
        self.reduced()
        # on XLA accelerate would now sum gradients over all ranks, those of other parameters too
        self.gradient_state.is_xla_gradients_synced = True
        super().step()
        self._reduced = None
        current().backend.mark_step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self._reduced = None


class MeshScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A scheduler that steps once for each dp rank, whose batches one optimizer step uses."""

    def __init__(self, scheduler: Any, optimizers: Any, step_with_optimizer: bool, split: bool) -> None:
        # "split batches" is one step for each of the optimizer's
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)
        self._times = 1 if split or not step_with_optimizer else current().batch.size

    def step(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self._times if self.gradient_state.sync_gradients else 1):
            super().step(*args, **kwargs)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` for models that ``tpcore.parallelize`` has sharded, or made of tpcore's layers.

    Its processes are the data-parallel ranks: ``num_processes`` and ``process_index`` are those of dp, a
    prepared data loader gives all ranks of one tp group the same batches, and ``gather`` and ``reduce`` go
    over dp. ``is_main_process`` is rank 0 of the world. ``prepare`` wraps no model; ``clip_grad_norm_`` and
    the optimizer's step take the mean of the gradients over dp, and the norm is that of the full gradient.

    Call ``tpcore.init`` first. Raises ValueError for what would mix parts of different ranks: fp16 loss
    scales, FSDP, DeepSpeed, a ``ParallelismConfig``, ``dispatch_batches=True``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check()

    @classmethod
    def of(cls, accelerator: accelerate.Accelerator) -> Accelerator:
        """An accelerator of accelerate's own class, configured by another program, on the mesh."""
        adopted = cls.__new__(cls)
        adopted.__dict__ = accelerator.__dict__
        adopted._check()
        return adopted

    def _check(self) -> None:
        mesh = current().mesh
        if self.distributed_type in _OTHERS or self.parallelism_config is not None:
            raise ValueError(
                f"accelerate was told to parallelize ({self.distributed_type.value}, parallelism_config="
                f"{self.parallelism_config}), and tpcore has the mesh {dict(mesh.axes)}: leave it to one"
            )
        if self.state.num_processes != mesh.size:
            raise ValueError(
                f"accelerate sees {self.state.num_processes} processes and the mesh {dict(mesh.axes)} has "
                f"{mesh.size}: start all of them with torchrun, call tpcore.init first, and give use_cpu=True on CPUs"
            )
        if self.scaler is not None or self.mixed_precision == "fp16":  # on CPUs accelerate makes no scaler
            raise ValueError(
                "mixed_precision='fp16' scales losses by what each rank finds in its own gradients: use bf16"
            )
        if self.dataloader_config.dispatch_batches:
            raise ValueError("dispatch_batches=True sends one batch's parts to ranks of one tp group: drop it")
        self.dataloader_config.dispatch_batches = False

    # -- who is who: batches differ over dp alone ---------------------------------------------------------
    @property
    def num_processes(self) -> int:
        return current().batch.size

    @property
    def process_index(self) -> int:
        ctx = current()
        return ctx.index(ctx.batch)

    # -- prepare ------------------------------------------------------------------------------------------
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        check_in_turn(self.gradient_accumulation_steps)
        seed = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seed, partial) and "rank" in seed.keywords:
            # workers that draw, for masks or crops, draw alike on the ranks of one tp group
            data_loader.worker_init_fn = partial(seed, rank=self.process_index)
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Autocast, compilation and placement as asked for; nothing is wrapped."""
        admit(model)
        if self.device_placement if device_placement is None else device_placement:
            move_model_to_device(model, current().device)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if not isinstance(optimizer, MeshOptimizer):
            optimizer = MeshOptimizer(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        if isinstance(scheduler, MeshScheduler):
            return scheduler
        optimizers = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) in (o, o.optimizer)]
        with_optimizer = self.step_scheduler_with_optimizer
        self._schedulers.append(
            MeshScheduler(scheduler, optimizers or self._optimizers, with_optimizer, self.split_batches)
        )
        return self._schedulers[-1]

    # -- gradients ----------------------------------------------------------------------------------------
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Mean over dp, then clipping; the norm of the full gradient. Collective over the world."""
        if self.gradient_state.sync_gradients is False:
            raise ValueError("clip_grad_norm_ between the batches of one step: call it if sync_gradients")
        check_max_norm(max_norm)
        cut = [o for o in self._optimizers if isinstance(o.optimizer, Zero1)]
        if cut and (len(self._optimizers) > 1 or norm_type != 2):
            raise ValueError(
                "with a Zero1 clip_grad_norm_ is of the 2-norm, and of one optimizer's parameters, "
                f"not of norm_type={norm_type} and {len(self._optimizers)} optimizers'"
            )
        steppings = [o.reduced() for o in self._optimizers]
        if not cut:
            return clip_grad_norm(parameters, max_norm, norm_type)
        norm: Tensor = steppings[0].norm()
        scale_to(steppings[0].gradients(), norm, max_norm)
        return norm

    @torch.no_grad()
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Mean over dp, then each entry of the optimizers' gradients between +-``clip_value``."""
        for optimizer in self._optimizers:
            for gradient in optimizer.reduced().gradients():
                gradient.clamp_(-clip_value, clip_value)

    # -- values of the data-parallel ranks ------------------------------------------------------------------
    def gather(self, tensor: Any) -> Any:
        """Tensors of all dp ranks, concatenated along dim 0; what has no dims becomes one entry."""
        gathered = current().batch.all_gather
        return recursively_apply(
            lambda t: gathered((t if t.ndim else t[None]).contiguous(), 0), tensor, error_on_other_type=True
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        objects = use_gather_object or not _tensors_only(input_data)
        if objects and self.num_processes != current().mesh.size:
            raise ValueError(
                "gather_for_metrics of objects (use_gather_object) would gather from ranks with the same "
                "batch too: pass tensors"
            )
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over the dp ranks."""
        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction must be 'sum', 'mean' or 'none', not {reduction!r}")
        dp = current().batch

        def reduce_tensor(t: Tensor) -> Tensor:
            if reduction == "none":
                return t
            total = dp.all_reduce(t.reshape(-1)).view(t.shape)
            return (total / dp.size if reduction == "mean" else total) * scale

        return recursively_apply(reduce_tensor, tensor, error_on_other_type=True)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        if self.num_processes != current().mesh.size:
            raise ValueError(
                "split_between_processes would give ranks of one tp group different inputs: take those of "
                "accelerator.process_index of accelerator.num_processes"
            )
        return super().split_between_processes(inputs, apply_padding)

    # -- files ----------------------------------------------------------------------------------------------
    def _only_model(self, where: str | None) -> nn.Module:
        """The one prepared model. Its optimizers learn the names of their parameters."""
        if where is None:
            raise ValueError("save_state and load_state on a mesh take a directory: name it")
        if len(self._models) != 1:
            raise ValueError(
                f"save_state and load_state are for one prepared model, not {len(self._models)}: call "
                "tpcore.checkpoint.save for each"
            )
        for optimizer in self._optimizers:
            name_parameters(optimizer.optimizer, self._models[0])
        model: nn.Module = self._models[0]
        return model

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **_: Any) -> str:
        """Model, optimizers, schedulers and what is registered, as one checkpoint of tpcore at
        ``output_dir``, without random numbers' states. Collective over the world."""
        state: dict[str, Any] = {"model": self._only_model(output_dir).state_dict(), "step": self.step}
        state |= {f"optimizer_{i}": o.optimizer for i, o in enumerate(self._optimizers)}
        state |= {f"scheduler_{i}": s.state_dict() for i, s in enumerate(self._schedulers)}
        state |= {f"other_{i}": o.state_dict() for i, o in enumerate(self._custom_objects)}
        checkpoint.save(state, str(output_dir))
        return str(output_dir)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **_: Any) -> None:
        """Load the checkpoint of ``save_state``, on any mesh. Collective over the world."""
        rest = checkpoint.load(str(input_dir), self._only_model(input_dir))
        objects = {"optimizer": self._optimizers, "scheduler": self._schedulers, "other": self._custom_objects}
        wanted = ("step", *(f"{kind}_{i}" for kind, some in objects.items() for i in range(len(some))))
        if missing := [key for key in wanted if key not in rest]:
            raise CheckpointError(
                f"{input_dir} holds no {', '.join(missing)}, but {', '.join(map(str, rest)) or 'the model alone'}: "
                "prepare what was prepared when save_state wrote it"
            )
        self.step = rest["step"]
        for i, optimizer in enumerate(self._optimizers):
            optimizer.optimizer.load_state_dict(fitted(optimizer.optimizer, rest[f"optimizer_{i}"]))
        for kind in ("scheduler", "other"):
            for i, stateful in enumerate(objects[kind]):
                stateful.load_state_dict(rest[f"{kind}_{i}"])

    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """The whole model in safetensors, as ``from_pretrained`` opens it. Collective over the world."""
        plain = self.unwrap_model(model)
        if "save_pretrained" in plain.__dict__:
            plain.save_pretrained(save_directory, max_shard_size=max_shard_size)
        else:
            super().save_model(model, save_directory, max_shard_size)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """The whole model, on the CPU of every rank."""
        return full_state_dict(self.unwrap_model(model) if unwrap else model)


def _tensors_only(data: Any) -> bool:
    try:
        recursively_apply(lambda t: t, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
