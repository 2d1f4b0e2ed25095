"""torch.compile: a model with tpcore's layers is one graph, which computes what the layers compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.cuda_on_cpu import StandIn
from helpers.rank_pool import RankPool
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.nested import tensors
from tpcore.runtime.context import ParallelContext, enter_process, leave_process
from tpcore_cpu_gloo.backend import GlooBackend

pytestmark = pytest.mark.processes
HIDDEN, HEADS, VOCAB = 16, 4, 9  # a vocabulary that 2 ranks pad
TWO = Mesh({"tp": 2})


class Model(nn.Module):
    """A transformer block between an embedding and a loss; both ranks hold its one key head."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        spread = {"sequence_dim": 1 if tokens else None}
        self.embed = tpcore.ParallelEmbedding(VOCAB, HIDDEN, padding_idx=0, pad=True, **spread)
        self.norm = tpcore.RMSNorm(HIDDEN, sequence_parallel=tokens)
        self.qkv = tpcore.ParallelQKV(HIDDEN, HEADS, 1, fused=True, bias=True, **spread)
        self.out = tpcore.RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=True, **spread)
        self.up = tpcore.ColumnParallelLinear(HIDDEN, 32, gather_output=False, **spread)
        self.down = tpcore.RowParallelLinear(32, HIDDEN, input_is_parallel=True, **spread)
        self.head = tpcore.ColumnParallelLinear(HIDDEN, VOCAB, gather_output=False, pad=True, **spread)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        parts = [t.unflatten(-1, (-1, self.qkv.head_dim)).transpose(1, 2) for t in self.qkv(self.norm(x))]
        y = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return tpcore.parallel_cross_entropy(self.head(x), target, 0.1).mean()


class Loss(nn.Module):
    """Of the first word, which one rank has."""

    def forward(self, logits: Tensor) -> Tensor:
        return tpcore.parallel_cross_entropy(logits, torch.zeros_like(logits[..., 0], dtype=torch.int64))


def _step(run: nn.Module, model: nn.Module, *given: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = run(*given)
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


def _as_after_init(ctx: ParallelContext, fn: Callable[..., None], *args: object) -> None:
    """The context as a program has it, which calls ``tpcore.init``; the pool enters it for a block."""
    torch._dynamo.reset()
    enter_process(ctx)
    try:
        Context().run(fn, ctx, *args)
    finally:
        leave_process()


def _alike(ctx: ParallelContext, tokens: bool, backend: str) -> None:
    torch.manual_seed(0)
    model = Model(tokens).double()
    ids = torch.randint(VOCAB, (3, 2, 9))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for one in ids:  # the second step takes the graph of the first
        given = one[:, :-1], one[:, 1:]
        want, got = _step(model, model, *given), _step(compiled, model, *given)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)  # float64, other fusions
    assert counter.frame_count == 1
    with pytest.raises(RuntimeError, match="ParallelEmbedding: an id does not fit a vocabulary of 9"):
        compiled(ids[0][:, :-1] + VOCAB, ids[0][:, 1:])


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks: each makes its graphs itself."""
    with RankPool(2, backend=request.param) as pool:
        yield pool


class Functional(GlooBackend):
    """As for a compiler that knows only torch's own collectives."""

    capabilities = replace(GlooBackend.capabilities, functional=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("two", "tokens", "backend"),
    [
        *(("cpu_gloo", True, "eager"), ("cpu_gloo", False, "inductor")),
        *((Functional, True, "inductor"), (Functional, False, "aot_eager")),
        (StandIn, True, "eager"),  # what reads values on a CPU is an assertion in the graph
    ],
    indirect=["two"],
)
def test_a_model_is_one_graph_with_the_same_values(two: RankPool, tokens: bool, backend: str) -> None:
    two.run(TWO, _as_after_init, _alike, tokens, backend, timeout=300)


def _other_layers(ctx: ParallelContext) -> None:
    torch.manual_seed(0)
    x, comm = torch.randn(4, 8, dtype=torch.float64, requires_grad=True), ctx.comm("tp")
    layers: list[nn.Module] = [
        tpcore.ColumnParallelLinear(8, 12),
        tpcore.ColumnParallelLinear(8, 9, pad=True, skip_bias_add=True),
        tpcore.RowParallelLinear(8, 6),
        tpcore.LayerNorm(8, sequence_parallel=True),
    ]
    for layer in layers:
        layer.double()
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))

    def moved(t: Tensor) -> Tensor:
        t = tpcore.comm.mappings.all_to_all(t, comm, 0, 1)
        return tpcore.comm.mappings.shift(t, comm) * comm.position + comm.broadcast(t.detach(), 1)

    compiled = torch.compile(moved, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), moved(x))
    grads = [torch.autograd.grad(f(x).square().sum(), x) for f in (moved, compiled)]
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.slow
@pytest.mark.parametrize("two", ["cpu_gloo", Functional], indirect=True)
def test_other_layers_and_collectives_compile_whole(two: RankPool) -> None:
    two.run(TWO, _as_after_init, _other_layers, timeout=300)


def _operators(ctx: ParallelContext, tokens: bool) -> set[str]:
    """Those of the graphs of a step, forward and backward, which are no operators of ATen."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    enter_process(ctx)
    try:
        Context().run(_one_step, tokens, aot_autograd(fw_compiler=kept))
    finally:
        leave_process()
    assert len(graphs) == 2
    found = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    return {name for name in found if not name.startswith(("aten.", "<built-in"))}


def _one_step(tokens: bool, backend: Callable[..., object]) -> None:
    model, ids = Model(tokens), torch.zeros(2, 9, dtype=torch.int64)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    compiled(ids[:, :-1], ids[:, 1:]).backward()


@pytest.mark.slow
@pytest.mark.parametrize("two", [Functional], indirect=True)
@pytest.mark.parametrize("tokens", [False, True])
def test_where_asked_for_graphs_hold_functional_collectives_alone(two: RankPool, tokens: bool) -> None:
    for found in two.run(TWO, _operators, tokens, timeout=300):
        assert "_c10d_functional.all_gather_into_tensor.default" in found
        assert "_c10d_functional.reduce_scatter_tensor.default" in found or not tokens
        assert {name.partition(".")[0] for name in found} == {"_c10d_functional"}


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "column": (lambda: tpcore.ColumnParallelLinear(8, 12), lambda: torch.randn(2, 8)),
    "row": (lambda: tpcore.RowParallelLinear(8, 6), lambda: torch.randn(2, 8)),
    "qkv": (lambda: tpcore.ParallelQKV(8, 4, 1, fused=True), lambda: torch.randn(2, 8)),
    "embedding": (lambda: tpcore.ParallelEmbedding(12, 8), lambda: torch.randint(12, (2, 3))),
    "loss": (Loss, lambda: torch.randn(2, 8) + tpcore.current().coord("tp")),
}


def _without_values(layer: nn.Module, x: Tensor) -> Callable[[Tensor], object]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = layer(mode.from_tensor(x))

    def program(x: Tensor) -> object:
        y = layer(x)
        assert [t.shape for t in tensors(fake)] == [t.shape for t in tensors(y)]
        return y

    return program


REAL = {"_allow_non_fake_inputs": True}  # a layer's own place in the group
TRACERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], object]]] = {
    "make_fx": lambda layer, x: make_fx(layer)(x),
    "make_fx before autograd": lambda layer, x: make_fx(layer, pre_dispatch=True)(x),
    **{
        f"make_fx, {mode}": lambda layer, x, mode=mode: partial(
            make_fx(partial(functional_call, layer), tracing_mode=mode, **REAL)(dict(layer.named_parameters()), x),
            dict(layer.named_parameters()),
        )
        for mode in ("fake", "symbolic")
    },
    "export": lambda layer, x: torch.export.export(layer, (x,), strict=False).module(),
    "fake tensors": _without_values,
    "trace": lambda layer, x: torch.jit.trace(layer, x, check_trace=False),
}


def _traced(ctx: ParallelContext, tracer: str) -> None:
    torch.manual_seed(0)
    for name, (make, example) in LAYERS.items():
        layer = make()
        comm = ctx.comm("tp")
        comm.entrance, calls = 0, comm.compared.total()  # as a program's first layer
        program = TRACERS[tracer](layer, example())
        assert comm.compared.total() == calls, name  # nothing was compared, and no graph keeps a comparison
        x = example()  # other values
        torch.testing.assert_close(program(x), layer(x), msg=lambda text, name=name: f"{name}: {text}")
        assert comm.compared.total() > calls or name in ("row", "loss")


@pytest.mark.parametrize("two", ["cpu_gloo"], indirect=True)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_gets_the_collectives_and_reads_nothing(two: RankPool, tracer: str) -> None:
    two.run(TWO, _traced, tracer)


def _inside_a_block(ctx: ParallelContext) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(tpcore.parallel_cross_entropy, fullgraph=True, backend="eager")
    logits, target = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(Exception, match=r"does not see the context of tpcore\.use: pass group="):
        compiled(logits, target)
    with_group = compiled(logits, target, group=ctx.comm("tp"))
    torch.testing.assert_close(with_group, torch.full((2,), 8.0).log())


@pytest.mark.parametrize("two", ["cpu_gloo"], indirect=True)
def test_a_context_that_a_block_enters_is_not_seen(two: RankPool) -> None:
    two.run(TWO, _inside_a_block, timeout=300)
