"""The module ``torch.neuron`` as programs and other libraries ask it: one device, whose memory is the host's."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .private import DeviceModule


class AskedModule(DeviceModule):
    touched = False
    """Whether anything has run on the device."""

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return self.touched

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs behind the host's back."""

    empty_cache = reset_peak_memory_stats = synchronize

    def current_stream(self, *_: Any, **__: Any) -> AskedModule:
        return self  # which a stream's user synchronizes

    Stream = Event = current_stream
    record_event = wait_event = wait_stream = record = wait = synchronize

    def stream(self, stream: Any) -> nullcontext[None]:
        return nullcontext()

    def memory_allocated(self, device: Any = None) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def get_device_name(self, device: Any = None) -> str:
        return "neuron (stand-in)"

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_rng_state_all(self) -> list[Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[Tensor]) -> None:
        self.set_rng_state(*states)


def stand_for_package(module: AskedModule) -> None:
    """Let other libraries, which ask whether AWS's package is there, find one that has ``module``."""
    package: Any = ModuleType("torch_neuronx")
    package.__spec__ = ModuleSpec(package.__name__, None)
    package.synchronize, package.get_fallback_ops = module.synchronize, list
    sys.modules.setdefault(package.__name__, package)
