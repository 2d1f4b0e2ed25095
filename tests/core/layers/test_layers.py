"""Every layer equals its plain torch module, ten lines a test. The generated matrix covers the options."""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.counting import counted
from helpers.worlds import by_call, each_rank
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpcore
from tpcore import ParallelContext
from tpcore.runtime.digests import compare_inputs
from tpcore.testing import matrix

WIDTH, HEADS, HEAD = 8, 4, 2


@each_rank(tp=4)
def test_a_key_head_goes_to_consecutive_ranks(ctx: ParallelContext) -> None:
    q, k, v = (nn.Linear(WIDTH, heads * HEAD) for heads in (HEADS, 2, 2))
    layer = tpcore.ParallelQKV.from_plain([linear.eval() for linear in (q, k, v)], HEADS, 2)
    assert not layer.training
    assert torch.equal(layer.q_proj.weight, q.weight.chunk(HEADS)[ctx.rank])
    for part, plain in ((layer.k_proj, k), (layer.v_proj, v)):
        assert torch.equal(part.weight, plain.weight.chunk(2)[ctx.rank // 2])


@pytest.mark.parametrize(("heads", "kv_heads", "fit"), [(6, 2, "1, 2, 6"), (12, 3, "1, 3, 6, 12"), (2, 1, "1, 2")])
@each_rank(tp=4)
def test_heads_that_do_not_fit(ctx: ParallelContext, heads: int, kv_heads: int, fit: str) -> None:
    message = f"tp=4 .* {heads} heads and {kv_heads} key and value heads fit tp={fit}$"
    with pytest.raises(ValueError, match=message):
        tpcore.ParallelQKV(24, heads, kv_heads)


# -- one copy of an input -------------------------------------------------------------------------------
class Reader(nn.Module):
    """Two projections of one tensor, called one after the other, as Hugging Face's attention and MLP do."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.two = (tpcore.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False) for _ in range(2))
        self.down = tpcore.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True)
        if shared:
            tpcore.layers.share_input(self, self.one, self.two)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.one(hidden_states)) * self.two(hidden_states))
        return out


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("how", ["plain", "recompute", "deepcopy", "sequence parallel"])
@each_rank(tp=2)
def test_a_shared_input_changes_no_number(ctx: ParallelContext, how: str, by_name: bool) -> None:
    grads = []
    for shared in (False, True):
        torch.manual_seed(0)
        reader, x = Reader(False), torch.randn(4, WIDTH)
        if how == "sequence parallel":
            for layer in reader.children():
                layer.sequence_dim = 0
            x = x.chunk(2)[ctx.rank]
        if shared:
            tpcore.layers.share_input(reader, reader.one, reader.two)
        reader, x = copy.deepcopy(reader) if how == "deepcopy" else reader, x.clone().requires_grad_()
        call = (lambda t, r=reader: r(hidden_states=t)) if by_name else reader
        y = checkpoint(call, x, use_reentrant=False) if how == "recompute" else call(x)
        y.square().sum().backward()
        grads.append([x.grad, *(p.grad for p in reader.parameters())])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


class Llama(nn.Module):
    """One layer of a Llama: attention and a gated MLP, five projections of two tensors."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        size = {"gather_output": False, "bias": False}
        self.q, self.k, self.v = (tpcore.ColumnParallelLinear(WIDTH, WIDTH, **size) for _ in range(3))
        self.o = tpcore.RowParallelLinear(WIDTH, WIDTH, bias=False, input_is_parallel=True)
        self.mlp = Reader(shared)
        if shared:
            tpcore.layers.share_input(self, self.q, self.k, self.v, argument="x")

    def forward(self, x: Tensor) -> Tensor:
        y = self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        out: Tensor = self.mlp(y)
        return out


@pytest.mark.parametrize(("shared", "wanted"), [(False, 16), (True, 10)])
def test_all_reduces_of_two_llama_blocks(shared: bool, wanted: int) -> None:
    """Forward 2 a block, backward 5 or 2; the embedding's sum and the head's input gradient come on top."""

    def step(ctx: ParallelContext) -> None:
        head = tpcore.ColumnParallelLinear(WIDTH, 16, bias=False, gather_output=False)
        model = nn.Sequential(tpcore.ParallelEmbedding(16, WIDTH), Llama(shared), Llama(shared), head)
        model(torch.zeros(2, 4, dtype=torch.long)).square().sum().backward()
        tpcore.reduce_gradients(model)

    _, calls = counted(tpcore.Mesh({"tp": 2}), step)
    assert [Counter(c.op for c in of_rank) for of_rank in calls] == [{"all_reduce sum": wanted}] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_collectives_of_qkv_with_replicated_heads(fused: bool) -> None:
    """Backward: the input's gradient over tp, the weights of k and v over the two ranks of a head."""

    def step(ctx: ParallelContext) -> None:
        layer = tpcore.ParallelQKV(WIDTH, HEADS, 2, fused=fused)
        torch.cat(layer(torch.randn(2, 4, WIDTH).requires_grad_()), -1).square().sum().backward()
        tpcore.reduce_gradients(layer)

    _, calls = counted(tpcore.Mesh({"tp": 4}), step)
    assert [Counter(c.size for c in of_rank) for of_rank in calls] == [{4: 1, 2: 1 if fused else 2}] * 4


@each_rank(tp=2)
def test_what_cannot_be_shared(ctx: ParallelContext) -> None:
    reader = Reader(True)
    with pytest.raises(ValueError, match=r"share_input: .* Reader .* no copies yet: .*input_is_copied=True"):
        tpcore.layers.share_input(reader, reader.one, reader.two)
    reader = Reader(False)
    with pytest.raises(ValueError, match=r"Reader.forward has no argument 'x' but \['hidden_states'\]"):
        tpcore.layers.share_input(reader, reader.one, reader.two, argument="x")


def of_vectors() -> Callable[[Tensor], Any]:
    layers = nn.Sequential(tpcore.ColumnParallelLinear(16, WIDTH), tpcore.ColumnParallelLinear(WIDTH, WIDTH))
    return lambda ids: layers(nn.functional.one_hot(ids, 16).float())


PROGRAMS: dict[str, Callable[[], Callable[[Tensor], Any]]] = {
    "the ids of ParallelEmbedding": lambda: tpcore.ParallelEmbedding(16, WIDTH),
    "the input of ColumnParallelLinear": of_vectors,
    "the targets of parallel_cross_entropy": lambda: partial(
        tpcore.parallel_cross_entropy, torch.zeros(4, 8), vocab_size=16
    ),
}


@pytest.mark.parametrize("what", PROGRAMS)
@each_rank(dp=2, tp=2)
def test_other_batches_on_the_ranks_of_a_tp_group_are_refused(ctx: ParallelContext, what: str) -> None:
    program = PROGRAMS[what]()
    program(torch.arange(4) + ctx.coord("dp"))
    with pytest.raises(ValueError, match=rf"of one tp group differ in {what}: .*ctx.index\(ctx.batch\).* \(\[.*; \["):
        program(torch.arange(4) + ctx.coord("tp"))


@each_rank(tp=2)
def test_hidden_states_are_of_no_program(ctx: ParallelContext) -> None:
    """torch's pipelines ask a stage for shapes with memory that nobody wrote, and a gradient where it trains."""
    layer, x = tpcore.ColumnParallelLinear(4, 4), torch.full((2, 4), float(ctx.rank))
    with torch.no_grad():
        layer(x)
    layer(nn.functional.layer_norm(x.requires_grad_() + torch.arange(4) * ctx.rank, (4,)))


@each_rank(tp=4)
def test_batches_are_compared_where_ranks_have_other_arguments(ctx: ParallelContext) -> None:
    given = "labels" if ctx.coord("tp") == 2 else "ids"
    with pytest.raises(ValueError, match=r"ranks 0 and 1 of one tp group differ in ids: "):
        compare_inputs({given: torch.arange(4) + ctx.coord("tp")}, ctx.comm("tp"), "a program")


@pytest.mark.parametrize("ids", [torch.tensor(5), torch.tensor([5, 0]), torch.tensor([[7], [1]])], ids=str)
@each_rank(tp=2)
def test_ids_of_any_shape(ctx: ParallelContext, ids: Tensor) -> None:
    plain = nn.Embedding(8, WIDTH)
    layer = tpcore.ParallelEmbedding.from_plain(plain)
    assert torch.equal(layer(ids), plain(ids))
    assert torch.equal(torch.vmap(layer)(ids.reshape(-1)), plain(ids.reshape(-1)))


# -- from a plain module ----------------------------------------------------------------------------------
class Conv1D(nn.Module):
    """As GPT-2's in transformers: a linear layer whose weight is [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.zeros(nf))


PAIRS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "column": (lambda: nn.Linear(8, 8), tpcore.ColumnParallelLinear.from_plain),
    "row": (lambda: nn.Linear(8, 8), tpcore.RowParallelLinear.from_plain),
    "column conv1d": (lambda: Conv1D(8, 8), tpcore.layers.ColumnParallelConv1D.from_plain),
    "row conv1d": (lambda: Conv1D(8, 8), tpcore.layers.RowParallelConv1D.from_plain),
    "embedding": (lambda: nn.Embedding(8, 8), tpcore.ParallelEmbedding.from_plain),
    "layer norm": (lambda: nn.LayerNorm(8), tpcore.LayerNorm.from_plain),
    "rms norm": (lambda: nn.RMSNorm(8), tpcore.RMSNorm.from_plain),
    "qkv": (lambda: nn.Linear(8, 24), lambda plain: tpcore.ParallelQKV.from_plain(plain, 4).qkv_proj),
}


@pytest.mark.parametrize("name", PAIRS)
@each_rank(tp=2)
def test_from_plain_keeps_what_the_module_is(ctx: ParallelContext, name: str) -> None:
    make, from_plain = PAIRS[name]
    plain = make().to(torch.bfloat16).eval()
    for p in plain.parameters():
        nn.init.normal_(p)  # norms and Conv1D start with constants, whose parts are all alike
    plain.weight.requires_grad_(False)
    state = torch.get_rng_state()
    layer = from_plain(plain)
    assert torch.equal(state, torch.get_rng_state())
    assert not layer.training
    for key, p in plain.named_parameters():
        mine = layer.get_parameter(key)
        assert torch.equal(mine, layer.shard_specs[key].shard(p.detach(), ctx.rank, 2))
        assert (mine.dtype, mine.requires_grad) == (torch.bfloat16, p.requires_grad)
    on_meta = from_plain(make().to("meta"))
    assert all(p.is_meta for p in on_meta.parameters())
    assert [p.shape for p in on_meta.parameters()] == [p.shape for p in layer.parameters()]


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2


MISFITS = by_call(r"""
ColumnParallelLinear.from_plain(nn.Embedding(4, 4))
    ColumnParallelLinear.from_plain takes a torch.nn.Linear, not Embedding
ParallelEmbedding.from_plain(Scaled(4, 4))
    Scaled has a forward of its own
layers.RowParallelConv1D.from_plain(nn.Linear(4, 4))
    RowParallelConv1D.from_plain takes transformers' Conv1D, .* not Linear
ColumnParallelLinear.from_plain(nn.Linear(4, 12), blocks=[Block(12, 4)])
    out_features=12 in blocks of 12 \(3 units of 4\) is not divisible by tp=2
ColumnParallelLinear.from_plain(nn.Linear(4, 12), blocks=[Block(8), Block(2)])
    blocks of 8 [+] 2 features are not out_features=12
RowParallelLinear(12, 4, blocks=[Block(12, 4, replicate=True)])
    would count them once for each copy
RowParallelLinear.from_plain(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    has the parameters \['bias'\], not \['bias', 'weight'\]
RMSNorm.from_plain(nn.RMSNorm(4, elementwise_affine=False))
    has no weight
ParallelQKV.from_plain([nn.Linear(4, 4)] * 2, 2)
    takes one module, q.k.v, or three, not 2
""")


@pytest.mark.parametrize("call", MISFITS)
@each_rank(tp=2)
def test_from_plain_says_what_does_not_fit(ctx: ParallelContext, call: str) -> None:
    with pytest.raises(ValueError, match=MISFITS[call]):
        eval(call, {**vars(tpcore), "nn": nn, "Scaled": Scaled})


@each_rank(tp=2)
def test_sizes_may_have_been_given_as_tensors(ctx: ParallelContext) -> None:
    plain = nn.Linear(torch.tensor(4), torch.tensor(8))  # type: ignore[arg-type]  as a plan of sizes by torch has them
    layer = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer(x), plain(x))
    plain.out_features = torch.tensor(6)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="weight of shape"):
        tpcore.ColumnParallelLinear.from_plain(plain)


@each_rank(tp=2)
def test_a_parameter_is_replaced_by_a_part(ctx: ParallelContext) -> None:
    """Not by the whole, with which a pair of layers gave tp times the output."""
    whole = torch.randn(8, 4)
    layer = tpcore.ColumnParallelLinear(4, 8, bias=False)
    with pytest.raises(ValueError, match=r"weight is this rank's part of \(8, 4\), of shape \(4, 4\), and not"):
        layer.weight = nn.Parameter(whole)
    layer.weight = nn.Parameter(layer.part_of("weight", whole))
    x = torch.randn(3, 4)
    torch.testing.assert_close(layer(x), x @ whole.t())
    other = tpcore.ParallelEmbedding(12, 4)
    with pytest.raises(ValueError, match="weight is this rank's part"):
        layer.weight = other.weight


# -- dims of tokens, and dtypes under autocast ------------------------------------------------------------
@each_rank(tp=2)
def test_tokens_are_along_another_dim_than_features(ctx: ParallelContext) -> None:
    """Along the features each rank would have a part of these, in silence where no weight refused the size."""
    for dim in (-1, 2):
        for layer, width in (
            (tpcore.ColumnParallelLinear(WIDTH, 6, sequence_dim=dim), WIDTH),
            (tpcore.RowParallelLinear(WIDTH, 6, False, input_is_parallel=True, sequence_dim=dim), WIDTH // 2),
        ):
            with pytest.raises(ValueError, match=rf"sequence_dim={dim}\): .* one of dims \[0, 1\]"):
                layer(torch.zeros(2, 4, width))
    ids = torch.arange(8).view(2, 4)
    for dim, columns in itertools.product((-1, 2), (False, True)):
        with pytest.raises(ValueError, match=rf"sequence_dim={dim}\): .* one of dims \[0, 1\]"):
            tpcore.ParallelEmbedding(8, 6, sequence_dim=dim, shard_across_embedding=columns)(ids)


@each_rank(tp=2)
def test_autocast_leaves_float64_as_torch_does(ctx: ParallelContext) -> None:
    plain, x = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), torch.randn(3, WIDTH, dtype=torch.float64)
    for layer in (tpcore.ColumnParallelLinear.from_plain(plain), tpcore.RowParallelLinear.from_plain(plain)):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(layer(x), plain(x))


# -- the matrix and the signatures know every layer -------------------------------------------------------
def test_the_matrix_knows_every_layer() -> None:
    """A new layer needs a row in ``tpcore/testing/matrix``, which the kit and ``tpcore verify`` then run."""
    layers = {getattr(tpcore.layers, name) for name in tpcore.layers.__all__}
    stack = [tpcore.ParallelModule]
    while stack:
        found = stack.pop().__subclasses__()
        stack += found
        # bases have no forward; what is in nxd adapts a layer that has a row, what is in models has its families
        own = {c for c in found if re.match(r"tpcore\.(?!nxd|models)", c.__module__)}
        layers |= {c for c in own if c.forward is not nn.Module.forward and not c.__name__.startswith("_")}
    classes = {layer for layer in layers if isinstance(layer, type)}
    classes -= {tpcore.layers.ContextParallelAttention}  # over cp, and the matrix is over tp: it has no parameters
    assert sorted(c.__name__ for c in classes - {row.layer for row in matrix.ROWS.values()}) == []


@each_rank(tp=2)
def test_features_of_a_forward_are_made_by_the_constructor(ctx: ParallelContext) -> None:
    """A forward asks no ShardSpec: that took 62 us a call at tp=32."""
    layer = tpcore.ColumnParallelLinear(4, 12, blocks=3)
    layer.shard_specs = {}
    layer(torch.randn(2, 4))
