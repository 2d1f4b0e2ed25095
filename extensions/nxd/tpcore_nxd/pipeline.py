"""The published pipeline engine: ``tpcore.PipelineModel`` behind its name and arguments. New code uses that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.layers.module import move_model_to_device
from tpcore.layers.sharding import sharding
from tpcore.log import inform
from tpcore.runtime.context import current
from tpcore.train.data_parallel import reduce_gradients
from tpcore.train.pipeline import PipelinedLayers, PipelineModel, find_layers

from .parallel_layers import parallel_state
from .paths import mirror

__all__ = ["NxDPPModel"]

_NAMES = """
auto_partition use_model_wrapper input_names leaf_module_cls autowrap_functions autowrap_modules autowrap_obj_methods
tracer_cls param_init_fn return_loss_on_cpu deallocate_pipeline_outputs fuse_microbatches
"""
_NEEDS_NOTHING = frozenset(_NAMES.split())
"""Arguments that ask for what is so here anyhow, or for a step that is not taken."""

_BY_HAND = "layers are divided evenly, and the loss is the module's own; leave it out"
_REFUSED = {
    "return_mb_loss": "run_train returns the loss of the batch",
    "trace_file_path": "no file with a timeline is written; torch.profiler makes one around run_train",
    "manual_pp_partition": _BY_HAND,
    "manual_pp_stage_partition_fn": _BY_HAND,
    "manual_pp_loss_fn": _BY_HAND,
}
"""Arguments that scripts pass as None or False, which is what is done; other values are errors."""


class Wrapper(nn.Module):
    """A model that is trained another way. Names of parameters and state, and what it lacks, are the model's inside."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple, for a subclass registers it under the name that is published

    def original_module(self) -> nn.Module:
        return self._original[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original_module().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.original_module().named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        modules: Iterator[tuple[str, nn.Module]] = self.original_module().named_modules(*args, **kwargs)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_module().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.original_module().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "_original"):  # not there yet
                raise
            return getattr(self.original_module(), name)


class NxDPPModel(Wrapper):
    """A model in pipeline stages, trained by ``run_train(**batch)``: see ``tpcore.PipelineModel``.

    The model's one list of layers becomes the stages, as many layers on each. Its forward returns the loss, alone, as
    ``.loss`` or first in a tuple. ``transformer_layer_cls``: of these layers, checked. ``pipeline_cuts``: the last
    layer of each stage but the last, checked to be these. Names of parameters and state are those of ``module``.

    ``run_train`` leaves gradients that are means over dp, unless ``use_zero1_optimizer`` or ``use_optimizer_wrapper``
    says that the optimizer takes them. ``broadcast_and_average_loss``: the returned loss is a mean over dp too.

    The module's own forward runs: arguments about tracing and memory need nothing here, and one line names those that
    are given. ValueError for what would change the result: ``virtual_pipeline_size`` above 1, ``return_mb_loss``,
    stages of unlike sizes, a loss elsewhere in the outputs, a partition by hand, and a file with a timeline.
    """

    def __init__(
        self,
        module: nn.Module,
        transformer_layer_cls: type[nn.Module] | None = None,
        num_microbatches: int = 1,
        virtual_pipeline_size: int = 1,
        output_loss_value_spec: Any = None,
        pipeline_cuts: Sequence[str] | None = None,
        *,
        broadcast_and_average_loss: bool = False,
        use_zero1_optimizer: bool = False,
        use_optimizer_wrapper: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(module)
        if virtual_pipeline_size != 1:
            call = f"NxDPPModel(virtual_pipeline_size={virtual_pipeline_size})"
            raise ValueError(f"{call}: interleaved stages are not here; leave it out")
        _check_options(options)
        _check_loss(output_loss_value_spec)
        owner, name = find_layers(module)
        layers = list(owner.get_submodule(name).children())
        if not all(isinstance(layer, transformer_layer_cls or nn.Module) for layer in layers):
            classes = sorted({type(layer).__name__ for layer in layers})
            asked = f"transformer_layer_cls={transformer_layer_cls and transformer_layer_cls.__name__}"
            raise ValueError(f"NxDPPModel({asked}): the model's one list of layers has {classes}")
        if pipeline_cuts:
            _check_cuts(pipeline_cuts, len(layers), current().mesh.axes.get("pp", 1))
        self.transformer_layer_cls = transformer_layer_cls or type(layers[0])
        self.original_torch_module = module
        self._average_gradients = not (use_zero1_optimizer or use_optimizer_wrapper)
        self._average_loss = broadcast_and_average_loss
        self._engine = PipelineModel(module, num_microbatches)
        _share_ends(module)

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of a batch; its loss, the same on every stage."""
        loss = self._engine.run_train(*args, **kwargs)
        if self._average_gradients:
            reduce_gradients(self.original_torch_module)
        return self._over_dp(loss)

    def run_eval(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch, without backward."""
        return self._over_dp(self._engine.run_eval(*args, **kwargs))

    def _over_dp(self, loss: Tensor) -> Tensor:
        data = current().data
        return data.all_reduce(loss.reshape(1)).reshape(()) / data.size if self._average_loss else loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_torch_module(*args, **kwargs)

    def move_model_to_device(self) -> None:
        """Move what this stage has to this rank's device."""
        move_model_to_device(self.original_torch_module, current().device)

    # what is local is all that a stage has
    local_parameters = Wrapper.parameters
    local_named_parameters = Wrapper.named_parameters
    local_buffers = Wrapper.buffers
    local_named_buffers = Wrapper.named_buffers
    local_modules = Wrapper.modules
    local_named_modules = Wrapper.named_modules
    local_state_dict = Wrapper.state_dict

    def local_children(self) -> Iterator[nn.Module]:
        return self.original_torch_module.children()

    def local_named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.original_torch_module.named_children()


@torch.no_grad()
def _share_ends(model: nn.Module) -> None:
    """Give all stages the first one's values of what no stage owns, for scripts seed each stage differently."""
    if (stages := current().over_axis("pp")) is None:
        return
    owned = {p for m in model.modules() if isinstance(m, PipelinedLayers) for p in m.parameters()}
    for p in model.parameters():
        sharded_as = sharding(p)
        if p not in owned and not p.is_meta and (sharded_as is None or "pp" not in sharded_as.axes):
            p.copy_(stages.broadcast(p, 0))


def _check_options(options: Mapping[str, Any]) -> None:
    """ValueError for a value that asks for something else than what is done; TypeError for unknown names."""
    for name, why in _REFUSED.items():
        if options.get(name):
            raise ValueError(f"NxDPPModel({name}={options[name]!r}): {why}")
    if unknown := sorted(n for n in options.keys() - _NEEDS_NOTHING - _REFUSED.keys() if not n.startswith("_")):
        raise TypeError(f"NxDPPModel: no arguments {unknown}; {sorted(_NEEDS_NOTHING)} are accepted")
    unneeded = [name for name, value in options.items() if value not in (None, False)]
    if unneeded and current().rank == 0:
        inform(f"NxDPPModel: {', '.join(unneeded)} need nothing here")


def _check_loss(spec: Any) -> None:
    first = isinstance(spec, tuple | list) and spec and spec[0] is True and not any(spec[1:])
    named = isinstance(spec, Mapping) and {k for k, v in spec.items() if v} == {"loss"}
    if spec in (None, True) or first or named:
        return
    raise ValueError(
        f"NxDPPModel(output_loss_value_spec={spec!r}): the loss is what forward returns, its .loss, or the "
        "first of a tuple: return it so"
    )


def _check_cuts(cuts: Sequence[str], layers: int, stages: int) -> None:
    numbers = [int(match[1]) if (match := re.search(r"(\d+)$", cut)) else -1 for cut in cuts]
    want = [layers // stages * stage - 1 for stage in range(1, stages)]
    if sorted(numbers) != want:
        raise ValueError(
            f"NxDPPModel(pipeline_cuts={list(cuts)}): {layers} layers on {stages} stages are cut after "
            f"{want}, as many on each"
        )


mirror(__name__, "pipeline.model")
mirror(parallel_state.__name__, "pipeline.comm")
