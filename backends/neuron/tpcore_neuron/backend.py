"""The backends over PyTorch/XLA and over AWS's native PyTorch. ``start`` imports torch_xla or torch_neuronx, not the
module: the import claims the device."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcore import settings
from tpcore.backend.interface import Backend, Capabilities, CompilerOptions, Dims, Function, LoadedProgram, ProgramInfo
from tpcore.c10d.backend import C10dBackend
from tpcore.comm.transport import Transport
from tpcore.errors import BackendError
from tpcore.extras import module_spec
from tpcore.layout.mesh import Group
from tpcore.runtime.context import current

from . import platform
from .settings import DEVICE, LIMITS
from .transport import XlaTransport

_BITS = (1 << 64) - 1


def as_on_neuron(can: Capabilities) -> Capabilities:
    """``can`` without float64, which becomes float32 on Neuron without a word."""
    return replace(can, dtypes=tuple(d for d in can.dtypes if d is not torch.float64))


class NeuronBackend(Backend):
    """One rank of a job on NeuronCores, or on any other PJRT device that ``PJRT_DEVICE`` names."""

    interface = 2
    transport_class = XlaTransport
    # the sizes of groups depend on the host: see platform.check_tp
    capabilities = Capabilities(tracing=True, dynamic_shapes=False)
    _compiler = CompilerOptions()
    _device = torch.device("xla")  # before the start too, for scripts that ask early: opens no runtime

    @classmethod
    def unavailable(cls) -> str | None:
        # the spec, not import: importing torch_xla claims the device and takes seconds
        if module_spec("torch_xla") is None:
            return f"torch_xla is not installed. {platform.INSTALL}"
        if wrong := platform.wrong_versions():
            return wrong
        if DEVICE.get() != DEVICE.default:
            return None  # another device is set explicitly, e.g. XLA on a CPU
        if module_spec("torch_neuronx") is None:
            return f"torch_neuronx is not installed. {platform.INSTALL}"
        if not platform.neuron_devices():
            return (
                "no NeuronCore is visible: there is no /dev/neuron0. Install aws-neuronx-dkms on a Trn1 or "
                "Inf2 host and give a container its devices (--device=/dev/neuron0); to try a model without "
                "the hardware use tpcore_neuron.testing.run_replicas"
            )
        return None

    @classmethod
    def most_ranks(cls) -> int | None:
        return platform.visible_cores(platform.target()) or None

    @classmethod
    def job(cls, folder: Path) -> dict[str, str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:  # free now; others may take it until it is used
            port = listener.getsockname()[1]
        return {settings.MASTER_ADDR.name: "127.0.0.1", settings.MASTER_PORT.name: str(port)}

    @classmethod
    def compile_ahead(cls, command: Sequence[str], world: int | None) -> list[ProgramInfo]:
        from .compile_ahead import compile_ahead

        return compile_ahead(command, world)

    def start(self, timeout: float) -> tuple[int, int]:
        settings.update({DEVICE.name: DEVICE.get()})
        import torch_xla
        import torch_xla.runtime as xr

        self._platform = platform.target()
        cores = platform.visible_cores(self._platform)
        platform.check_cores(self._platform, settings.LOCAL_WORLD_SIZE.get(), cores)
        if self._platform is not None:
            self.capabilities = as_on_neuron(self.capabilities)  # type: ignore[misc]  # of this machine
        self._owns = not dist.is_initialized()
        if self._owns:
            import torch_xla.distributed.xla_backend  # registers "xla"

            alone: dict[str, Any] = (
                {} if settings.MASTER_ADDR.is_set else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
            )
            dist.init_process_group("xla", timeout=timedelta(seconds=timeout), **alone)  # or of torchrun
        elif dist.get_backend() != "xla":
            raise BackendError(
                f"torch.distributed is initialized with {dist.get_backend()!r}, and the neuron backend needs "
                "'xla': call torch.distributed.init_process_group('xla'), or leave it to tpcore.init"
            )
        self._device = torch_xla.device()
        rank, world = xr.global_ordinal(), xr.world_size()
        asked = settings.WORLD_SIZE.get() if settings.WORLD_SIZE.is_set else world
        if asked != world:
            self.stop()
            text = f"{asked} processes were started and the XLA runtime connects {world}: "
            if str(xr.device_type()) == "CPU":
                text += "on a CPU it connects no processes. Without the hardware run the ranks as replicas in one "
                raise BackendError(f"{text}process: tpcore_neuron.testing.run_replicas(fn, {asked})")
            text += "start one process for each NeuronCore with torchrun, and init tpcore before anything else touches"
            raise BackendError(f"{text} the device")
        if settings.CHECK.get() == "always":
            from . import reads

            reads.watch()
        return rank, world

    def stop(self) -> None:
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
        self._owns = False

    def connect(self, group: Group, rank: int) -> Transport:
        if "tp" in group.axes and len(group.axes) == 1:
            platform.check_tp(self._platform, group)
        # with the whole partition; all ranks make all groups in one order
        options = {"xla_pg_options": {"mesh": group.as_list()}}
        groups = {ranks: dist.new_group(list(ranks), pg_options=options) for ranks in group.partition}
        return XlaTransport(group, rank, groups[group.members(rank)])

    def adopt(self, process_group: Any) -> Transport:
        """Collectives over a ``torch.distributed`` group of the xla backend that has its whole partition."""
        mesh = getattr(process_group, "_mesh", None) or [list(range(dist.get_world_size()))]
        partition = tuple(tuple(ranks) for ranks in mesh)
        if sum(len(ranks) for ranks in partition) != dist.get_world_size():
            raise BackendError(
                f"the group {partition} names only some of {dist.get_world_size()} ranks, so that ranks "
                "would run different programs: make it with torch.distributed.new_group(ranks, "
                "pg_options={'xla_pg_options': {'mesh': all_groups}})"
            )
        return XlaTransport(Group(("user",), partition), dist.get_rank(), process_group)

    def device(self) -> torch.device:
        return self._device

    @classmethod
    def memory_of(cls, t: Tensor) -> object:
        if t.device.type != "xla":
            return super().memory_of(t)
        import torch_xla

        # XLA tensors have no address; the tensor id is equal for a weight and its detach(), and differs for views
        return "xla", torch_xla._XLAC._xla_get_tensor_id(t)

    def mark_step(self) -> None:
        import torch_xla

        torch_xla.sync()

    def compile_with(self, options: CompilerOptions) -> bool:
        self._compiler = options
        return platform.target() is not None

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        from . import programs

        programs.trace(fn, weights, inputs, current(), folder, self._compiler)

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        from . import programs

        return programs.load(folder, weights, current().named)

    def get_rng_state(self) -> Tensor:
        import torch_xla.core.xla_model as xm

        state = xm.get_rng_state()  # unsigned 64 bits, stored as int64
        return torch.tensor([state - (1 << 64) if state >> 63 else state])

    def set_rng_state(self, state: Tensor) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(int(state) & _BITS)

    def manual_seed(self, seed: int) -> None:
        import torch_xla.core.xla_model as xm

        xm.set_rng_state(seed & _BITS)


class NativeBackend(C10dBackend):
    """One rank of a job under torchrun, over AWS's native PyTorch: torch.distributed's collectives on the ``neuron``
    device. From torch-neuronx 2.13 on (Trn2, Trn3) there is no torch_xla: tensors are on the device ``neuron``, and
    torch.distributed has a transport of that name. It has not been run on the hardware, but on its stand-in."""

    interface = 2
    # sums of complex numbers are tested on gloo only; float64 would be float32 without a word
    capabilities = replace(
        as_on_neuron(C10dBackend.capabilities),
        moved=(),
        exchange_sizes=(4, 8, 16, *range(32, 1025, 32)),
        unequal_parts=False,
        broadcasts=False,
        whole_sums=False,
        functional=True,
        tracing=True,
        dynamic_shapes=False,
    )
    transport = "neuron"
    lazy = True  # whatever the device: it is known after the start
    _device = torch.device("privateuseone")  # which torch_neuronx renames

    @classmethod
    def unavailable(cls) -> str | None:
        if platform.neuron_devices() or LIMITS.is_set:
            return None
        return (
            "no NeuronCore is visible: there is no /dev/neuron0. To try a script without the hardware, set "
            f"{LIMITS.name}=2.33"
        )

    @classmethod
    def most_ranks(cls) -> int | None:
        return None if LIMITS.is_set else platform.visible_cores("trn2")

    @classmethod
    def compile_ahead(cls, command: Sequence[str], world: int | None) -> list[ProgramInfo]:
        from .compile_ahead import compile_native

        return compile_native(command, world)

    @classmethod
    def remark(cls) -> str:
        return ". ".join(platform.surprises())

    def start(self, timeout: float) -> tuple[int, int]:
        if LIMITS.is_set:
            from .stand_in import group

            group.register(LIMITS.get())
        else:
            import torch_neuronx  # noqa: F401  registers the device and the transport
        platform.check_native(self.most_ranks())
        try:
            started = super().start(timeout)
        except AssertionError as e:  # of the runtime's set-up, and often without a word
            raise BackendError(
                f"the Neuron runtime did not start ({e}). Was the device used before tpcore.init? The first group "
                "opens this process's core: call tpcore.init, or torch.distributed.init_process_group('neuron'), "
                "before anything is moved to the device"
            ) from e
        self._device = torch.device("neuron", self._module().current_device())  # the runtime's own choice
        return started

    def device(self) -> torch.device:
        return self._device

    def trace(
        self, fn: Function, weights: Mapping[str, Tensor], inputs: Sequence[Tensor], dims: Dims, folder: Path
    ) -> None:
        from . import native_programs  # torch.export takes a second to import

        native_programs.trace(fn, weights, inputs, current(), folder)

    def load_program(self, folder: Path, weights: Mapping[str, Tensor]) -> LoadedProgram:
        from . import native_programs

        return native_programs.load(folder, weights, current())

    def _settle(self, pg: Any) -> None:
        """No connections are made later, and a sum on the device would be one more program to compile."""

    def get_rng_state(self) -> Tensor:
        state: Tensor = self._module().get_rng_state()
        return state

    def set_rng_state(self, state: Tensor) -> None:
        self._module().set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        self._module().manual_seed(seed)

    def _module(self) -> Any:
        """torch's module of the device."""
        return torch.neuron  # type: ignore[attr-defined]  # of torch_neuronx
