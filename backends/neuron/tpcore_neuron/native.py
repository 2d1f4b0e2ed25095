"""The backend over AWS's native PyTorch: torch.distributed's collectives on the ``neuron`` device. From
torch-neuronx 2.13 on (Trn2, Trn3) there is no torch_xla: tensors are on the device ``neuron``, and
``torch.distributed`` has a transport of that name. The two names are parameters, so that the same code runs over
gloo on a CPU, where it is tested. It has not been run on the hardware."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpcore import settings
from tpcore.c10d.backend import C10dBackend

from . import platform


class NativeBackend(C10dBackend):
    """One rank of a job under torchrun. ``device`` and ``transport``: their names in torch."""

    interface = 2
    # sums of complex numbers are tested on gloo only
    capabilities = replace(C10dBackend.capabilities, moved=())
    transport = "neuron"

    def __init__(self, device: str = "neuron", transport: str = "neuron") -> None:
        super().__init__()
        self._kind = device
        self.transport = transport  # type: ignore[misc]  # of this instance only: gloo, in tests

    @classmethod
    def unavailable(cls) -> str | None:
        if not platform.neuron_devices():
            return "no NeuronCore is visible: there is no /dev/neuron0"
        return None

    def start(self, timeout: float) -> tuple[int, int]:
        if self._kind == "neuron":
            import torch_neuronx  # noqa: F401  registers the device and the transport
        return super().start(timeout)

    def device(self) -> torch.device:
        if self._kind == "cpu":
            return torch.device("cpu")
        return torch.device(self._kind, settings.LOCAL_RANK.get())

    def get_rng_state(self) -> Tensor:
        state: Tensor = self._random().get_rng_state()
        return state

    def set_rng_state(self, state: Tensor) -> None:
        self._random().set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self._random().manual_seed(seed)

    def _random(self) -> Any:
        """The module with the device's random state: ``torch.neuron``, or torch itself for the CPU."""
        return torch if self._kind == "cpu" else getattr(torch, self._kind)
