"""The model of a training script: built on every rank, cut into stages, moved, and wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...comm.comm import Comm
from ...layers.module import move_model_to_device
from ...runtime.consensus import gather_bytes
from ...runtime.context import current, is_initialized
from ...train.pipeline import PipelinedLayers, find_layers
from ...train.pipeline.model import loss_of
from ..pipeline.model import NxDPPModel
from ..wrapper import Wrapper
from .config import Config, neuronx_distributed_config


class NxDModel(Wrapper):
    """A model and how it is trained. Names of parameters and state are those of the model itself."""

    def __init__(self, module: nn.Module, nxd_config: Config) -> None:
        super().__init__(module.original_module() if isinstance(module, NxDPPModel) else module)
        self.module, self.nxd_config = module, nxd_config
        self.pp_enabled = isinstance(module, NxDPPModel)

    def local_modules(self) -> list[nn.Module]:
        """This rank's part, which is what ``original_module`` has here."""
        return [self.original_module()]

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch; the loss, on every rank."""
        if isinstance(self.module, NxDPPModel):
            return self.module.run_train(*args, **kwargs)
        loss = loss_of(self.module(*args, **kwargs), type(self.module).__name__)
        loss.backward()
        return loss.detach()

    def run_eval(self, *args: Any, **kwargs: Any) -> Any:
        """The loss of a batch without backward; without stages what the model returns."""
        if isinstance(self.module, NxDPPModel):
            return self.module.run_eval(*args, **kwargs)
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.original_module().named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.original_module().named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        found: Iterator[tuple[str, nn.Module]] = self.original_module().named_modules(*args, **kwargs)
        return found


def initialize_parallel_model(
    nxd_config: Config,
    model_fn: Callable[..., nn.Module],
    include_buffers: bool = False,
    *model_args: Any,
    **model_kwargs: Any,
) -> NxDModel:
    """``model_fn(*model_args, **model_kwargs)`` on this rank: in stages where pp is above 1, on the device,
    with activation checkpointing where the configuration has it.

    Layers allocate this rank's shards alone, so ``meta_device_init`` puts nothing on meta, buffers neither
    (``include_buffers``): it has ``param_init_fn(module, device)`` fill every module that owns parameters.
    Scripts seed each stage differently, so that its layers start from numbers of their own. Here every stage
    draws all layers, and what no stage owns has to be one value on all: stages draw as the first one does.
    """
    if not is_initialized():
        neuronx_distributed_config(**nxd_config)
    if nxd_config["pipeline_parallel_size"] > 1:
        _draw_as_the_first(current().comm("pp"))
    model = model_fn(*model_args, **model_kwargs)
    model_init = nxd_config["model_init_config"]
    if model_init["meta_device_init"]:
        _fill(model, model_init["param_init_fn"])
    classes = _checkpointed(model, nxd_config["activation_checkpoint_config"])
    wrapped: nn.Module = model
    if nxd_config["pipeline_parallel_size"] > 1:
        wrapped = NxDPPModel(model, **{"use_optimizer_wrapper": True, **nxd_config["pipeline_config"]})
    move_model_to_device(model, current().device)
    # the layers of a pipeline are computed again anyhow
    pipelined = {child for m in model.modules() if isinstance(m, PipelinedLayers) for child in m.modules()}
    for module in model.modules():
        if isinstance(module, classes) and module not in pipelined:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    made = NxDModel(wrapped, nxd_config)
    made.train()
    return made


def _draw_as_the_first(stages: Comm) -> None:
    """Set the host's generator to its state on the first stage. Collective over the stages."""
    states = gather_bytes(bytes(torch.get_rng_state().tolist()), stages)
    torch.set_rng_state(torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))


def _fill(model: nn.Module, param_init_fn: Any) -> None:
    if param_init_fn is None:
        raise ValueError("model_init_config: meta_device_init=True needs a param_init_fn(module, device)")
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            with torch.no_grad():
                param_init_fn(module, torch.device("cpu"))


def _checkpointed(model: nn.Module, asked: Any) -> tuple[type[nn.Module], ...]:
    """The classes whose forward is computed again in backward."""
    if asked is None:
        return ()
    if asked == "full":
        owner, name = find_layers(model)
        return tuple({type(layer) for layer in owner.get_submodule(name).children()})
    classes = tuple(asked) if isinstance(asked, list | tuple) else (asked,)
    wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, nn.Module))]
    if wrong or not classes:
        raise ValueError(f"activation_checkpoint_config must be None, 'full' or classes of modules, not {asked!r}")
    return classes
