"""Steps on tensors of a device that does not exist: a mix of it with the CPU raises, and so does a read of a value.

Its tensors have shapes and no values. Run with the names of cases; it prints each that went through.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.config import patch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import tpcore
from tpcore.backend import Backend, Capabilities
from tpcore.checkpoint.stored import ReadPlan, Stored
from tpcore.checkpoint.write.snapshot import StateTensor, on_host
from tpcore.comm.transport import Primitive, Transport
from tpcore.comm.wrapper import TransportWrapper
from tpcore.layout.mesh import Group, Mesh
from tpcore.layout.slices import Region
from tpcore.runtime.context import ParallelContext

DEVICE = "gpu"


class Shapes(TransportWrapper):
    """Results of the right shape. What the host reads once a step is on meta, where the step knows of no values."""

    compares = True

    @property
    def in_graphs(self) -> Transport:
        return self  # fake tensors otherwise get operators

    def relay(self, primitive: Primitive, x: Tensor, *arguments: Any) -> Tensor:
        if self.position.device != x.device:
            raise AssertionError(f"{primitive.name} of a tensor on {x.device}")
        if arguments[:1] == ("max",) and x.dtype == torch.int64:
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return primitive.result(x, self.size, *arguments)


class OnFakeDevice(Backend):
    interface = 2
    transport_class = Shapes
    capabilities = Capabilities()

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def start(self, timeout: float) -> tuple[int, int]:
        return 0, 4

    def connect(self, group: Group, rank: int) -> Shapes:
        with self.mode:  # groups are made on first use, also where a model is made
            return Shapes(group, rank, self.device())

    def device(self) -> torch.device:
        return torch.device(DEVICE, 0)


class BlockingCopyError(AssertionError):
    """The host would wait for all that the device has to do."""


class Unblocked(TorchDispatchMode):
    """Refuses copies from host memory to the device for which the host would wait, such as that of ``torch.tensor``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        blocking = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
        if func in blocking and out.device.type == DEVICE and out.numel():  # caches of transformers begin empty
            source = args[blocking[func]]
            if source.device.type == "cpu" and not (args[2:] or (kwargs or {}).get("non_blocking")):
                raise BlockingCopyError(f"{func} of {source.shape}")
        return out


class Model(torch.nn.Module):
    def __init__(self, sequence_dim: int | None) -> None:
        super().__init__()
        self.embedding = tpcore.ParallelEmbedding(50, 16, pad=True, sequence_dim=sequence_dim)
        self.norm = tpcore.RMSNorm(16, sequence_parallel=sequence_dim is not None)
        self.qkv = tpcore.ParallelQKV(16, 4, 2, sequence_dim=sequence_dim)
        self.out = tpcore.RowParallelLinear(16, 16, input_is_parallel=True, sequence_dim=sequence_dim)
        self.up = tpcore.ColumnParallelLinear(16, 32, gather_output=False, sequence_dim=sequence_dim)
        self.down = tpcore.RowParallelLinear(32, 16, input_is_parallel=True, sequence_dim=sequence_dim)
        self.head = tpcore.ColumnParallelLinear(16, 51, gather_output=False, pad=True, sequence_dim=sequence_dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(self.norm(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x))))


def moved(ctx: ParallelContext, made: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """A model that is made with values, on the fake device."""
    assert isinstance(ctx.backend, OnFakeDevice)
    mode = ctx.backend.mode
    with unset_fake_temporarily():
        model = made()
    return model._apply(lambda t: mode.from_tensor(t).detach().to(ctx.device))


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[Tensor], Tensor]) -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64, device=DEVICE)
    for watch in (nullcontext(), Unblocked()):  # groups are made in the first step
        with watch:
            with tpcore.overlap_grad_reduce(optimizer):
                loss_of(ids).backward()
            tpcore.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    for name, p in model.named_parameters():
        assert p.device.type == DEVICE, name


def layers(ctx: ParallelContext, sequence_dim: int | None = None) -> None:
    model = moved(ctx, lambda: Model(sequence_dim))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    trained(model, optimizer, lambda ids: tpcore.parallel_cross_entropy(model(ids), ids, label_smoothing=0.1).mean())


def zero(ctx: ParallelContext) -> None:
    model = moved(ctx, lambda: Model(None).bfloat16())
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    with unset_fake_temporarily():  # it tries the optimizer with values, on the CPU
        optimizer = tpcore.Zero1(
            torch.optim.SGD, model.named_parameters(), master_dtype=torch.float32, grad_dtype=torch.float32, **options
        )
    trained(model, optimizer, lambda ids: tpcore.parallel_cross_entropy(model(ids), ids).mean())


class OnHost:
    """A stored tensor, which is read into host memory."""

    shape = (2, 3)

    def read(self, starts: Any, out: Tensor, check: bool) -> None:
        assert out.device.type == "cpu"


class Pinned(TorchFunctionMode):
    """What goes through pinned memory, and which copies the host does not wait for."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = [name for name in ("pin_memory", "non_blocking") if (kwargs or {}).get(name)]
        self.found += [f"{func.__name__} {name}" for name in chosen]
        return func(*args, **(kwargs or {}))


def saved(ctx: ParallelContext) -> None:
    """A save in the background has a copy in host memory when it returns; a load copies from host memory."""
    x = torch.ones(2, 3, device=DEVICE)
    kept = on_host({"file": {"x": StateTensor(x)}})["file"]["x"]
    assert [piece.device.type for piece in kept.pieces()] == ["cpu"]
    shard: Any = OnHost()
    stored = Stored.over_tp("x", None, 1, 0, lambda rank: shard)
    plan = ReadPlan(stored, (2, 3), [(shard, Region(0, (0, 0), (0, 0), (2, 3)))])
    plan.fill(x)  # the first asks once whether there is pinned memory
    with Pinned() as calls:
        plan.fill(x)
    assert calls.found == ["empty pin_memory", "copy_ non_blocking"], calls.found


def caught(ctx: ParallelContext) -> None:
    """What the device is for: each kind of mistake is seen."""
    x = torch.ones(2, device=DEVICE)
    for wrong, error in (
        (lambda: x + torch.ones(2), FakeTensorDeviceMismatchError),
        (x.tolist, DataDependentOutputException),
        (lambda: torch.tensor([1.0], device=DEVICE), BlockingCopyError),
        (lambda: torch.ones(2).to(DEVICE), BlockingCopyError),
        (lambda: x.copy_(torch.ones(2)), BlockingCopyError),
    ):
        try:
            with Unblocked():
                wrong()
        except error:
            continue
        raise AssertionError(f"{error.__name__} was not raised")


CASES: dict[str, Callable[[ParallelContext], None]] = {
    "caught": caught,
    "layers": layers,
    "sequence": partial(layers, sequence_dim=1),
    "zero": zero,
    "saved": saved,
}
Cases = Mapping[str, Callable[[ParallelContext], None]]


def main(cases: Cases = CASES, meshes: Mapping[str, Mapping[str, int]] | None = None) -> None:
    os.environ["TPCORE_CHECK"] = "off"  # the first batches have no values to compare
    _setup_privateuseone_for_python_backend(DEVICE)
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) makes a fake one
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    FakeTensorMode.may_turn_const = lambda self, t: False  # type: ignore[method-assign]  it would run them
    for name in sys.argv[1:] or cases:
        mode = FakeTensorMode()
        with (
            mode,
            patch(fake_tensor_allow_meta=True),
            tpcore.use(
                ParallelContext(OnFakeDevice(mode), Mesh((meshes or {}).get(name, {"dp": 2, "tp": 2})), 0)
            ) as ctx,
        ):
            cases[name](ctx)
        print(name)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
