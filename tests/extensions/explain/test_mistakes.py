"""Mistakes that a model's author can make end in the right result or in an error that names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.worlds import each_rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tpcore
from tpcore import Block, Mesh
from tpcore.runtime.context import ParallelContext, use
from tpcore.testing import run_ranks
from tpcore_explain.checked import raising


# -- a padded head ------------------------------------------------------------------------------------------
def _head(vocab: int, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, vocab, bias).double(), torch.randn(6, 4).double(), torch.randint(vocab, (6,))


@pytest.mark.parametrize("vocab", [10, 5])  # at tp=4 the last rank of 5 has nothing but padding
@each_rank(tp=4)
def test_the_loss_of_a_padded_head_knows_the_padding(ctx: ParallelContext, vocab: int) -> None:
    plain, x, target = _head(vocab)
    want = F.cross_entropy(plain(x), target)
    (grad,) = torch.autograd.grad(want, plain.bias)
    head = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=False, pad=True)
    loss = tpcore.parallel_cross_entropy(head(x), target).mean()
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert head.bias is not None
    torch.testing.assert_close(
        head.bias.grad, tpcore.layers.shard_specs(head)["bias"].shard(grad, ctx.rank, ctx.mesh.size)
    )


HIDING: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda z: z / 2.0,
    "added": lambda z: z + 0.1,
    "masked": lambda z: z.masked_fill(torch.arange(z.shape[-1]) == 0, -1e4),
    "cast": lambda z: z.float(),
    "put together": lambda z: torch.cat([z[:2], z[2:]]),
}


@pytest.mark.parametrize("how", HIDING)
@pytest.mark.parametrize("tied", [False, True])
@each_rank(tp=4)
def test_padding_that_an_operation_hides_is_refused_unless_the_size_is_given(
    ctx: ParallelContext, how: str, tied: bool
) -> None:
    """After a head and after the table of an embedding; columns of padding that are not zero any more too."""
    plain, x, target = _head(10, bias=False)
    head = tpcore.ColumnParallelLinear.from_plain(plain, gather_output=False, pad=True)
    if tied:
        table = tpcore.ParallelEmbedding(10, 4, pad=True, dtype=torch.float64)
        table.load_state_dict(head.state_dict())
    logits = HIDING[how](F.linear(x, table.weight) if tied else head(x))
    with pytest.raises(ValueError, match=r"layer with pad=True makes 3 features on each of 4 .* vocab_size="):
        tpcore.parallel_cross_entropy(logits, target)
    want = F.cross_entropy(HIDING[how](plain(x)), target) if how in ("scaled", "cast", "put together") else None
    loss = tpcore.parallel_cross_entropy(logits, target, vocab_size=10).mean()
    if want is not None:
        torch.testing.assert_close(loss, want)
    with pytest.raises(ValueError, match="vocab_size="):
        torch.compile(_loss_of, backend="eager")(logits.detach(), target, tpcore.current().comm("tp"))


def _loss_of(logits: Tensor, target: Tensor, comm: tpcore.comm.Comm) -> Tensor:
    return tpcore.parallel_cross_entropy(logits, target, group=comm)


# -- parts taken for wholes, and ranks with other data ------------------------------------------------------
class Model(nn.Module):
    """Right as it is; a test exchanges one part of it for what is wrong."""

    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        spread = {"sequence_dim": 1 if tokens else None}
        self.embed = tpcore.ParallelEmbedding(12, 8, **spread)
        self.norm: nn.Module = tpcore.RMSNorm(8, sequence_parallel=tokens)
        self.qkv = tpcore.ColumnParallelLinear(8, 24, gather_output=False, blocks=[Block(8, 2)] * 3, **spread)
        self.out = tpcore.RowParallelLinear(8, 8, input_is_parallel=True, **spread)
        self.head = tpcore.ColumnParallelLinear(8, 12, gather_output=False, **spread)
        self.loss = tpcore.parallel_cross_entropy

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.qkv(self.norm(x))
        q, k, v = h.view(*h.shape[:-1], 3, -1, 2).permute(2, 0, 3, 1, 4)
        # as attention is written by hand, with a norm of each head: both over dims that are whole
        weights = F.softmax(F.rms_norm(q, (2,)) @ k.transpose(-1, -2), -1)
        x = x + F.dropout(self.out((weights @ v).transpose(1, 2).flatten(2)), 0.0)
        logits = self.head(x).float() / 2.0
        return self.loss(logits.flatten(0, 1), target.flatten()).mean()


def _softmax(logits: Tensor, target: Tensor) -> Tensor:
    return logits.softmax(-1)[..., 0]


CUT = "cross_entropy sees only 6 of 12 features.* use tpcore.parallel"
NORM = r"rms_norm with a parameter of shape \(8,\) sees 2 of 4 tokens.*tpcore.RMSNorm"
MISTAKES: dict[str, tuple[str, Callable[[], object], str]] = {
    "F.cross_entropy": ("loss", lambda: F.cross_entropy, CUT),
    "softmax": ("loss", lambda: _softmax, "softmax sees only 6 of 12 features.*gather them"),
    "nn.RMSNorm": ("norm", lambda: nn.RMSNorm(8), NORM),
}
GIVEN = torch.arange(8).view(2, 4) % 5, torch.arange(8).view(2, 4) % 3  # targets that each rank has


@pytest.mark.parametrize("name", MISTAKES)
def test_a_part_taken_for_the_whole_is_found(name: str) -> None:
    part, wrong, says = MISTAKES[name]

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model = Model(tokens=part == "norm")
        setattr(model, part, wrong())
        return model, GIVEN

    (found,) = tpcore.explain(build, tp=2).mistakes
    assert re.search(says, found)
    assert found.startswith("norm: " if part == "norm" else "Model: ")

    def run() -> None:
        model, given = build()
        model(*given)

    for said in _checked(run):
        assert re.search(says, said)


def _checked(fn: Callable[[], object]) -> list[str]:
    """What a checked run of two ranks says of ``fn``."""

    def run(_: ParallelContext, call: Callable[[], object]) -> str:
        try:
            call()
        except ValueError as e:
            return str(e)
        return ""

    return run_ranks(Mesh({"tp": 2}), run, fn, check=True)


@pytest.mark.parametrize("shape", [(2, 3), (1, 6), (6, 1), (3, 2), (2, 4)])
@pytest.mark.parametrize("flat", ["flatten", "view", "transpose"])
def test_the_cut_dim_is_not_guessed_by_its_size(shape: tuple[int, int], flat: str) -> None:
    """As many tokens as a rank has words, in one dim or in two."""

    def loss() -> None:
        z = tpcore.ColumnParallelLinear(8, 12, gather_output=False)(torch.randn(*shape, 8))
        target = torch.zeros(shape, dtype=torch.int64)
        if flat == "transpose":
            F.cross_entropy(z.transpose(1, 2), target)
        else:
            F.cross_entropy(z.flatten(0, 1) if flat == "flatten" else z.view(-1, 6), target.flatten())

    assert all("cross_entropy sees only 6 of 12 features" in said for said in _checked(loss))


class _Heads(nn.Module):
    """Something over the dims of each rank's heads, after a projection."""

    def __init__(self, heads: int, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(8, 4 * heads, gather_output=False, blocks=[Block(4 * heads, 4)])
        self.heads, self.then = tpcore.layout.divide(heads, 2), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.up(x).view(*x.shape[:2], self.heads, 4)).sum()


RIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of a head": lambda q: F.rms_norm(q, (4,)),
    "softmax in a head": lambda q: q.softmax(-1),
    "normalize a head": lambda q: F.normalize(q, dim=-1),
    "softmax over tokens": lambda q: q.softmax(1),
    "the same after a transposition": lambda q: q.transpose(1, 2).softmax(2),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_heads_of_a_rank_are_whole(heads: int, name: str) -> None:
    """One head on each rank too; as many tokens as features or heads of a rank."""
    for tokens in (2, 4, 5):
        x = torch.randn(1, tokens, 8)
        assert _checked(lambda x=x: _Heads(heads, RIGHT[name])(x)) == ["", ""]
        assert tpcore.explain(lambda x=x: (_Heads(heads, RIGHT[name]), x), tp=2).mistakes == ()
    over = _checked(lambda: _Heads(heads, lambda q: q.softmax(2))(torch.randn(1, 5, 8)))
    assert all("softmax sees only" in said for said in over) == (heads > 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_flattened_tokens_are_a_part_too(dim: int) -> None:
    def route() -> None:
        x = tpcore.ParallelEmbedding(12, 8, sequence_dim=dim)(torch.zeros(4, 4, dtype=torch.int64))
        nn.Linear(8, 2)(x.reshape(-1, 8))

    for said in _checked(route):
        assert "linear with a parameter of shape (2, 8) sees 8 of 16 tokens" in said


def test_compiled_code_is_checked_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=compiler)
    monkeypatch.setenv("TPCORE_CHECK", "1")
    tpcore.init(backend="cpu_gloo")
    double(torch.ones(2))
    tpcore.shutdown()
    assert not compiled
    double(torch.ones(2))
    assert compiled

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model = Model()
        model.loss = _softmax
        model.compile(fullgraph=True)
        return model, GIVEN

    assert len(tpcore.explain(build, tp=2).mistakes) == 1


@pytest.mark.parametrize("tokens", [False, True])
def test_nothing_is_found_in_a_model_that_is_right(tokens: bool) -> None:
    assert tpcore.explain(lambda: (Model(tokens), GIVEN), tp=2).mistakes == ()

    def run(ctx: ParallelContext) -> None:
        unwatched = Model(tokens)
        with use(replace(ctx, observer=raising())):
            torch.manual_seed(0)
            model = Model(tokens)
            model.load_state_dict(unwatched.state_dict())
            loss, want = model(*GIVEN), unwatched(*GIVEN)
            torch.testing.assert_close(loss, want, rtol=0, atol=0)
            for one in (loss, want):
                one.backward()
            for p, q in zip(model.parameters(), unwatched.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
            tpcore.optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))

    run_ranks(Mesh({"dp": 1, "tp": 2}), run)


def _other_seed(ctx: ParallelContext) -> None:
    torch.manual_seed(ctx.coord("tp"))
    Model()


def _other_batch(ctx: ParallelContext) -> None:
    Model()((GIVEN[0] + ctx.coord("tp")) % 5, GIVEN[1]).backward()


def _other_activations(ctx: ParallelContext) -> None:
    tpcore.ColumnParallelLinear(8, 8)(torch.randn(64, 8) * (1 + ctx.coord("tp")))


def _other_targets(ctx: ParallelContext) -> None:
    Model()(GIVEN[0], (GIVEN[1] + ctx.coord("tp")) % 5).backward()


OTHER: dict[str, tuple[Callable[[ParallelContext], None], str]] = {
    "seed": (_other_seed, "ranks {} and {} .* the random state for the initial weight of ParallelEmbedding at "),
    "batch": (_other_batch, r"ranks {} and {} .* the ids of ParallelEmbedding at .*test_mistakes.*same batch"),
    "activations": (_other_activations, "the input of ColumnParallelLinear at .*in _other_activations"),
    "targets": (_other_targets, "the targets of parallel_cross_entropy at "),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", OTHER)
@each_rank(dp=2, tp=2)
def test_ranks_of_one_group_with_other_data_are_named(ctx: ParallelContext, name: str) -> None:
    spoil, says = OTHER[name]
    ctx, first = replace(ctx, observer=raising()), 2 * ctx.coord("dp")
    with use(ctx):
        spoil(ctx)
        with pytest.raises(ValueError, match=says.format(first, first + 1)):
            tpcore.optimizer_step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


# -- a job that is started with TPCORE_CHECK=1 finds each ------------------------------------------------------
def _with_part(name: str) -> None:
    part, wrong, _ = MISTAKES[name]
    torch.manual_seed(0)
    model = Model(tokens=part == "norm")
    setattr(model, part, wrong())
    model(*GIVEN).backward()


def _with_other(name: str, ctx: ParallelContext) -> None:
    torch.manual_seed(0)  # the mistake before this one may have been another seed
    OTHER[name][0](ctx)
    tpcore.optimizer_step(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def _wrapped() -> None:
    torch.manual_seed(0)
    DistributedDataParallel(Model())


def said_of(names: list[str]) -> dict[str, str]:
    """What each mistake ends with."""
    said = {}
    for name in names:
        ctx = tpcore.init("cpu_gloo", tp=2)
        try:
            if name in MISTAKES:
                _with_part(name)
            elif name in OTHER:
                _with_other(name, ctx)
            elif name != "none":
                _wrapped()
            said[name] = "no error"
        except ValueError as e:
            said[name] = str(e)
        tpcore.shutdown()
    return said


@pytest.mark.slow
@pytest.mark.processes
def test_each_is_named_on_every_rank() -> None:
    expected = {name: match for name, (_, _, match) in MISTAKES.items()}
    expected |= {name: match.format(0, 1) for name, (_, match) in OTHER.items()}
    expected |= dict.fromkeys(("batch", "activations", "targets"), "ranks 0 and 1 of one tp group differ in ")
    expected["DistributedDataParallel"] = r"hold different parts of 'embed\.weight'"
    expected["none"] = "^no error$"
    for rank in tpcore.launch(said_of, 2, args=([*expected],), env={"TPCORE_CHECK": "1"}):
        assert rank.keys() == expected.keys()
        for name, match in expected.items():
            assert re.search(match, rank[name]), (name, rank[name])
    some = ["DistributedDataParallel", next(iter(MISTAKES)), next(iter(OTHER))]
    silent = tpcore.launch(said_of, 2, args=(some,), env={"TPCORE_CHECK": "warmup"})[0]
    assert [name for name, text in silent.items() if text != "no error"] == some[:1]
