"""The backend for GPUs where none is, over gloo: all of it but the device's own calls."""

from __future__ import annotations

import torch

from tpcore.c10d.transport import C10dTransport
from tpcore_cuda import CudaBackend, CudaOverGloo


class NotRead(C10dTransport):
    """As on a GPU the host would wait for a value."""

    reads_are_cheap = False  # type: ignore[assignment]


class OnCpu(CudaBackend):
    transport, transport_class = "gloo", NotRead

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def start(self, timeout: float) -> tuple[int, int]:
        torch.cuda.set_device = lambda device: None
        return super().start(timeout)

    def _enter_thread(self) -> None:
        """There is no driver."""

    def device(self) -> torch.device:
        return torch.device("cpu")

    def _generator(self) -> torch.Generator:
        return torch.default_generator


class StandIn(OnCpu, CudaOverGloo):
    """Whose host waits, as that of gloo does."""
