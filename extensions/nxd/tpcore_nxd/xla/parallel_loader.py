"""A loader whose batches are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .xla_model import mark_step, moved

__all__ = ["MpDeviceLoader"]


class MpDeviceLoader:
    """The batches of ``loader``, moved to ``device``; after each ``batches_per_execution`` of them a step ends.

    Its length and further attributes are the loader's. The other arguments are about threads and queues, and change
    nothing; ``input_sharding`` is refused.
    """

    def __init__(
        self,
        loader: Any,
        device: Any,
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: None = None,
    ) -> None:
        if input_sharding is not None:
            raise ValueError("MpDeviceLoader(input_sharding=): one process has one device; shard layers by tp")
        self._loader, self._device, self._most = loader, device, batches_per_execution

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self._loader, 1):
            yield moved(batch, self._device)
            if i % self._most == 0:
                mark_step()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)
