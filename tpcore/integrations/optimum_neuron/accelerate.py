"""optimum-neuron's Accelerator: ``prepare`` cuts the model as well."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..accelerate import Accelerator
from ..accelerate.state import over_dp
from .options import ModelParallelismPlugin, TrainingNeuronConfig, join, note


class NeuronAccelerator(Accelerator):
    """``tpcore.integrations.accelerate.Accelerator`` that cuts models as ``mp_plugin`` or ``trn_config`` says
    when they are prepared, and, with ``zero_1``, optimizers over dp. Joins the job."""

    def __init__(
        self,
        *args: Any,
        mp_plugin: ModelParallelismPlugin | None = None,
        trn_config: TrainingNeuronConfig | None = None,
        zero_1: bool = False,
        autocast_backend: str = "xla",
        **kwargs: Any,
    ) -> None:
        if mp_plugin is not None and trn_config is not None:
            raise ValueError("mp_plugin and trn_config say the same: give one")
        self.mp_plugin = mp_plugin or trn_config or ModelParallelismPlugin()
        self.zero_1 = zero_1
        join(self.mp_plugin.tensor_parallel_size, self.mp_plugin.pipeline_parallel_size)
        note({"autocast_backend": autocast_backend}, {"autocast_backend": "xla"})
        super().__init__(*args, **kwargs)

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Models are cut first, so that the order of ``args`` is free."""
        for model in args:
            if isinstance(model, nn.Module):
                self.mp_plugin.parallelize_model(model)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        known = getattr(optimizer, "optimizer", optimizer)
        return super().prepare_optimizer(over_dp(known) if self.zero_1 else optimizer, device_placement)
