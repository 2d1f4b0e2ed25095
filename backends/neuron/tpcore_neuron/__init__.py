"""The neuron backend's registration. The only place that says what a Neuron machine needs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from tpcore.backend import Backend, hookimpl
from tpcore.errors import BackendError

if TYPE_CHECKING:
    import torch

    from tpcore.comm import Comm
    from tpcore.mesh import Group

_NOT_YET = (
    "this release of tpcore registers the name but does not include the XLA collectives yet; "
    "use backend='cpu_gloo'"
)
_INSTALL = (
    "torch_xla is not installed. Trn1 and Inf2 need torch 2.9, torch-xla 2.9 and torch-neuronx 2.9:\n"
    "    pip install 'tpcore[neuron]' --extra-index-url https://pip.repos.neuron.amazonaws.com\n"
)


class NeuronBackend(Backend):
    """Listed, so that its name is known and its absence explained; it never starts."""

    @classmethod
    def unavailable(cls) -> str:
        # find_spec, not import: importing torch_xla claims the device and takes seconds
        installed = find_spec("torch_xla") is not None
        return _NOT_YET if installed else f"{_INSTALL}Even so, {_NOT_YET}"

    def start(self, timeout: float) -> NoReturn:
        raise BackendError(f"backend 'neuron' cannot start: {self.unavailable()}")

    def comm(self, group: Group, rank: int) -> Comm:
        raise BackendError(f"backend 'neuron' has no collectives: {self.unavailable()}")

    def device(self) -> torch.device:
        raise BackendError(f"backend 'neuron' has no device: {self.unavailable()}")


@hookimpl
def tpcore_backend() -> type[Backend]:
    return NeuronBackend
