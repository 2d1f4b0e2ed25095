"""The backend for GPUs where none is: its own code over gloo on CPUs, and no wait for values in a step.

Not shown here: the device's own calls, and NCCL.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.cuda_on_cpu import OnCpu, StandIn
from helpers.places import TESTS
from helpers.rank_pool import RankPool
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

import tpcore
from tpcore.backend.registry import backend_class
from tpcore.c10d.backend import C10dBackend
from tpcore.cli.app import app
from tpcore.errors import BackendError, CollectiveTimeoutError, PeerLostError
from tpcore.layers import loss
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks
from tpcore_cuda import CudaBackend, CudaOverGloo
from tpcore_cuda.backend import Queue

TP2 = Mesh({"tp": 2})
OF_TORCH = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
READS = {"tolist", "item", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


class OneGpu(StandIn):
    """NCCL's rule, and two ranks that have one GPU between them."""

    _supervised = CudaBackend._supervised

    def _place(self) -> str:
        return "GPU-7"


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, backend=StandIn) as made:
        yield made


# -- the host never waits for a value ---------------------------------------------------------------------
class _Calls(TorchFunctionMode):
    """Methods that read values, by name: some never reach the dispatcher on a CPU. And tensors that are made on the
    default device, which would not be the other tensors' device.
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.found.append(name)
        if func in _device_constructors() and (kwargs or {}).get("device") is None:
            self.found.append(f"{name} without a device")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Operators whose result's shape, or whose result, is known to the host only when the device has run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def reads(fn: Any) -> tuple[list[str], int]:
    """The reads of values in ``fn()``, and how many operators it ran."""
    with _Calls() as calls, _Operators() as operators:
        fn()
    return calls.found + operators.found, operators.count


class Model(torch.nn.Module):
    def __init__(self, sequence_dim: int | None) -> None:
        super().__init__()
        self.embedding = tpcore.ParallelEmbedding(
            50, 16, pad=True, shard_across_embedding=sequence_dim is not None, sequence_dim=sequence_dim
        )
        self.norm = tpcore.LayerNorm(16, sequence_parallel=sequence_dim is not None)
        self.up = tpcore.ColumnParallelLinear(16, 32, gather_output=False, sequence_dim=sequence_dim)
        self.down = tpcore.RowParallelLinear(32, 16, input_is_parallel=True, sequence_dim=sequence_dim)
        self.head = tpcore.ColumnParallelLinear(16, 51, gather_output=False, pad=True, sequence_dim=sequence_dim)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def _step(ctx: ParallelContext, sequence_dim: int | None, dtype: torch.dtype) -> tuple[list[str], float | None]:
    """What a step reads, and for float16 the scale of a GradScaler after an overflow on rank 1 alone."""
    torch.manual_seed(0)
    model = Model(sequence_dim)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW reads its count of steps, which is on the host
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if dtype == torch.float16 else None
    ids = torch.arange(8).view(2, 4)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits = model(ids)
            loss = tpcore.parallel_cross_entropy(logits, ids, label_smoothing=0.1).mean()
        assert logits.dtype == dtype
        (loss if scaler is None else scaler.scale(loss)).backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0, scaler=scaler)
        if scaler is not None:
            scaler.update()

    for _ in range(2):  # of which the ranks compare the batches
        step()
    assert not ctx.comm("tp").reads_are_cheap
    found = reads(step)[0]
    if scaler is None:
        return found, None
    before = [p.detach().clone() for p in model.parameters()]
    model.up.weight.register_hook(lambda g: g.fill_(float("inf")) if ctx.rank else g)
    step()
    assert all(map(torch.equal, before, model.parameters()))
    return found, scaler.get_scale()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sequence_dim", [None, 1])
def test_a_step_reads_no_value(ranks: RankPool, sequence_dim: int | None, dtype: torch.dtype) -> None:
    """With a scaler tpcore's own question, to all ranks, and that of torch's scaler, whose answer is then there."""
    env = {"TPCORE_CHECK": "warmup"}  # a checked run compares values
    questions = ["item", "item", "_local_scalar_dense", "_local_scalar_dense"]  # each by both counters
    want = (questions, 8.0) if dtype == torch.float16 else ([], None)
    for found in ranks.run(TP2, _step, sequence_dim, dtype, env=env):
        assert found == want


def test_the_counters_see_what_a_layer_reads_on_a_cpu_backend() -> None:
    (found,) = run_ranks(Mesh({"tp": 1}), lambda ctx: reads(lambda: tpcore.ParallelEmbedding(4, 2)(torch.arange(4)))[0])
    assert found


def test_the_counters_see_reads_and_tensors_without_a_device() -> None:
    x = torch.ones(3)
    one = (x.tolist, x.nonzero, lambda: float(x[0]), lambda: bool(x.any()), lambda: x.max().item())
    for fn in (*one, lambda: x[x > 0], lambda: torch.ones(2)):
        assert reads(fn)[0], fn


def _kernels(ctx: ParallelContext, tokens: int) -> int:
    logits = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.arange(tokens) % 128
    run = lambda: tpcore.parallel_cross_entropy(logits, target, vocab_size=128).sum().backward()  # noqa: E731
    for _ in range(2):  # in which the ranks compare targets
        run()
    return reads(run)[1]


def test_the_loss_is_a_few_kernels_however_many_tokens(ranks: RankPool) -> None:
    env = {"TPCORE_CHECK": "warmup"}  # a checked run compares targets
    few, many = (ranks.run(TP2, _kernels, tokens, env=env)[0] for tokens in (64, 4 * loss.CHUNK // 64))
    assert few == many < 100  # views count too


def _bad_input(ctx: ParallelContext, what: str) -> None:
    if what == "id":
        tpcore.ParallelEmbedding(4, 2)(torch.tensor([4]))
    tpcore.parallel_cross_entropy(torch.ones(1, 2), torch.tensor([4]), vocab_size=4)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("id", "ParallelEmbedding: an id does not fit a vocabulary of 4"),
        ("target", "parallel_cross_entropy: an id does not fit a vocabulary of 4"),
    ],
)
def test_bad_input_is_an_assertion_in_the_queue(ranks: RankPool, what: str, said: str) -> None:
    for outcome in ranks.outcomes(TP2, _bad_input, what):
        assert said in str(outcome.error)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"), reason="torch is older"
)
def test_no_tensor_is_on_a_wrong_device() -> None:
    """Layers, ZeRO-1 and tokens over ranks, on a device that is not the CPU, whose values nobody may read."""
    script = TESTS / "scripts" / "fake_device.py"
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["caught", "layers", "sequence", "zero", "saved"], done.stderr


# -- the job ----------------------------------------------------------------------------------------------
def _trained(ctx: ParallelContext, zero: bool, overlap: bool) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = Model(None)
    parameters, events = model.named_parameters(), list[str]()
    optimizer = tpcore.Zero1(torch.optim.SGD, parameters, lr=0.1) if zero else torch.optim.SGD(parameters, lr=0.1)
    transport: Any = ctx.comm("dp").transport
    enter = transport._watch.enter
    transport._watch.enter = lambda op, x: (events.append(op), enter(op, x))
    for i in range(3):
        optimizer.zero_grad()
        with tpcore.overlap_grad_reduce(optimizer) if overlap else nullcontext():
            ids = torch.arange(4 * ctx.coord("dp"), 4 * ctx.coord("dp") + 4).view(2, 2) + i
            tpcore.parallel_cross_entropy(model(ids), ids).mean().backward()
            events.append("backward is done")
        tpcore.optimizer_step(optimizer, max_norm=1.0)
    transport._watch.enter = enter
    return [p.detach() for p in model.parameters()], events


@pytest.mark.parametrize(("zero", "op"), [(False, "all_reduce sum"), (True, "reduce_scatter dim 0")])
def test_gradients_are_on_their_way_before_backward_ends(ranks: RankPool, zero: bool, op: str) -> None:
    """The same bits, of collectives that are under way beside backward from the second step on."""
    mesh = Mesh({"dp": 2, "tp": 1})
    for (want, after), (got, events) in zip(
        ranks.run(mesh, _trained, zero, False), ranks.run(mesh, _trained, zero, True), strict=True
    ):
        assert all(map(torch.equal, got, want))
        assert op not in after[: after.index("backward is done")]
        steps = " ".join(events).split("backward is done")
        assert [op in part for part in steps] == [False, True, True, False]
        assert sorted(events) == sorted(after)  # none was made twice


class _Matmuls(TorchDispatchMode):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("matmul")
        return func(*args, **(kwargs or {}))


def _backward(ctx: ParallelContext) -> list[str]:
    """What the backward of a layer does, in order."""
    x = torch.ones(4, 8, requires_grad=True)
    y = tpcore.ColumnParallelLinear(8, 8, gather_output=False)(x)
    transport, events = cast(Any, ctx.comm("tp").transport), list[str]()
    enter, finish = transport._watch.enter, transport.finish
    transport._watch.enter = lambda op, x: (events.append(op), enter(op, x))
    transport.finish = lambda work: (events.append("wait"), finish(work))
    with _Matmuls(events):
        y.sum().backward()
    transport._watch.enter, transport.finish = enter, finish
    return events


def test_the_gradient_of_the_input_is_summed_beside_the_matmul_for_the_weights(ranks: RankPool) -> None:
    for events in ranks.run(TP2, _backward):
        assert events == ["matmul", "all_reduce sum", "matmul", "wait"]


def _rank(ctx: ParallelContext) -> int:
    return ctx.rank


def test_two_ranks_on_one_gpu_are_refused_on_both() -> None:
    with RankPool(2, backend=OneGpu) as both:
        for outcome in both.outcomes(TP2, _rank):
            assert isinstance(outcome.error, BackendError)
            assert "ranks 0 and 1 are both on GPU GPU-7, and NCCL takes one rank a GPU" in str(outcome.error)
        assert both.run(TP2, _rank, env={"NCCL_MULTI_RANK_GPU_ENABLE": "1"}) == [0, 1]


def _unfinished(ctx: ParallelContext) -> None:
    """Rank 0 starts a sum that rank 1 never joins, and does not wait for it, as on a GPU."""
    comm = ctx.comm("tp")
    transport: Any = comm.transport
    watch, aborted = transport._watch, threading.Event()
    watch.parting(aborted.set)
    watch._lazy = True
    if ctx.rank == 0:
        queue = Queue(0.5)
        queue.follow(watch, transport._calls.allreduce([torch.ones(2)]).is_completed)
        queue.start()
        queue.join()
    assert aborted.wait(30.0)
    comm.all_reduce(torch.ones(2))


def test_a_collective_that_the_device_never_completes_ends_the_job(ranks: RankPool) -> None:
    """The queue's thread posts the verdict, the monitor aborts the groups, and the next collective raises."""
    for outcome in ranks.outcomes(TP2, _unfinished):
        assert isinstance(outcome.error, CollectiveTimeoutError)
        assert "in a collective of group [0, 1]" in str(outcome.error)


def test_a_queue_forgets_what_is_complete_and_ends_at_once() -> None:
    queue, asked = Queue(1e-9), []
    for _ in range(3):
        queue.follow(None, lambda: not asked.append(True))  # type: ignore[arg-type,func-returns-value]
    queue.start()
    while len(asked) < 3:
        time.sleep(0.01)
    queue.close()
    assert not queue.is_alive()


class Done:
    """The event of a device that has run what it was given."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


def test_a_capture_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs yet, and the driver refuses calls."""
    queue, watch = Queue(60.0), SimpleNamespace(finish=lambda work: None)
    monkeypatch.setattr(torch.cuda, "Event", Done)
    for capturing, followed in ((True, 0), (False, 1)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)  # noqa: B023  called at once
        queue.finish(cast(Any, watch), None)
        assert len(queue._under_way) == followed
    queue.start()
    queue.close()


class Queued(OnCpu):
    """All that the backend does for NCCL, over gloo: a queue follows the collectives, and a lost job aborts them."""

    lazy = True  # type: ignore[assignment]
    aborted: list[tuple[int, ...]]

    def start(self, timeout: float) -> tuple[int, int]:
        self.aborted = []
        torch.cuda.Event = Done  # type: ignore[assignment,misc]
        torch.cuda.is_current_stream_capturing = lambda: False
        return super().start(timeout)

    def _supervised(self, supervisor: Any) -> None: ...

    def _abort(self, watch: Any, pg: Any) -> None:
        if watch.lost_job is not None:
            self.aborted.append(watch.members)
        super()._abort(watch, pg)


def _left(ctx: ParallelContext, zero: bool) -> None:
    """Train; then rank 1 goes. Rank 0 waits for it, and aborts their group."""
    backend: Any = ctx.backend
    _trained(ctx, zero, True)
    assert backend.aborted == []
    assert backend._queue.is_alive()
    if ctx.rank == 1:
        os._exit(7)
    with pytest.raises(PeerLostError, match="rank 1"):
        ctx.comm("dp").all_reduce(torch.ones(2))
    deadline = time.monotonic() + 30.0
    while not backend.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backend.aborted == [(0, 1)]


def test_a_lost_rank_aborts_the_groups(ranks: RankPool) -> None:
    mesh = Mesh({"dp": 2, "tp": 1})
    with RankPool(2, backend=Queued) as both:
        runs = [[tensors for tensors, _ in pool.run(mesh, _trained, False, False)] for pool in (both, ranks)]
        for got, want in zip(*runs, strict=True):
            assert all(map(torch.equal, got, want))
        first, _ = both.outcomes(mesh, _left, True)
        assert isinstance(first.error, PeerLostError)  # of the end of its context: the job stays lost


def test_the_gpu_of_the_local_rank_is_current_before_the_job_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank would open a context on GPU 0, and NCCL join with that. The thread that asks for events has it
    too, and asks as torch's watch does: its questions end no capture of another thread."""
    seen: list[object] = []
    asked = threading.Event()

    def exchange(mode: Any) -> None:
        seen.append(("mode", mode._obj.value))
        asked.set()

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    monkeypatch.setattr(C10dBackend, "start", lambda self, timeout: asked.wait(30.0) and seen.append("joined"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    for variable in OF_TORCH:
        monkeypatch.delenv(variable, raising=False)
    backend = CudaBackend()
    backend.start(1.0)
    gpu = torch.device("cuda", 1)
    assert seen == [gpu, gpu, ("mode", 1), "joined"]
    assert {variable: os.environ[variable] for variable in OF_TORCH} == OF_TORCH
    backend.stop()
    assert not OF_TORCH.keys() & os.environ.keys()


def test_a_queue_ends_when_the_device_has_failed() -> None:
    """Without a word of its own: the rank's next call of the device raises the error."""
    queue = Queue(60.0)

    def failed() -> bool:
        raise RuntimeError("CUDA error: device-side assert triggered")

    queue.follow(None, failed)  # type: ignore[arg-type]
    queue.start()
    queue.join(30.0)
    assert not queue.is_alive()
    queue.close()


def test_a_job_that_has_ended_leaves_no_group_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its context, which layers keep, lives on."""
    monkeypatch.setattr(torch.cuda, "set_device", torch.cuda.set_device)  # which OnCpu replaces
    contexts, threads = [], []
    for _ in range(3):  # torch keeps threads of its own from the first job on
        contexts.append(tpcore.init(OnCpu()))
        assert contexts[-1].comm("tp").process_group.size() == 1
        tpcore.shutdown()
        assert not dist.is_initialized()
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[0] == threads[2]


# -- where it can run -------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_why_it_cannot_run_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    why = backend_class("cuda").unavailable()
    assert why
    assert "\n" not in why
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert "sees no GPU: nvidia-smi must list one" in str(backend_class("cuda").unavailable())
    with pytest.raises(BackendError, match=r"backend 'cuda' cannot run here: .*sees no GPU"):
        tpcore.init(backend="cuda")


def test_what_carries_the_collectives_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaBackend, "unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    said = "NCCL 2.27.5, one rank a GPU, between ranks on NVIDIA H200"
    for command in ("backends", "doctor"):
        assert said in CliRunner().invoke(app, [command]).output.replace("\n", " "), command
    monkeypatch.setenv("TPCORE_CUDA_TRANSPORT", "gloo")
    assert CudaOverGloo.remark() == "gloo, which copies through the host, between ranks on NVIDIA H200"


def test_the_transport_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_class("cuda") is CudaBackend
    monkeypatch.setenv("TPCORE_CUDA_TRANSPORT", "gloo")
    assert backend_class("cuda") is CudaOverGloo
    monkeypatch.setenv("TPCORE_CUDA_TRANSPORT", "mpi")
    with pytest.raises(BackendError, match="TPCORE_CUDA_TRANSPORT must be one of nccl, gloo, not 'mpi'"):
        backend_class("cuda")


def test_no_backend_named_means_cuda_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from tpcore.runtime.init import default_backend

    monkeypatch.delenv("TPCORE_BACKEND", raising=False)
    monkeypatch.setattr(CudaBackend, "unavailable", lambda: None)
    assert default_backend() == ("cuda", "it can run here")
