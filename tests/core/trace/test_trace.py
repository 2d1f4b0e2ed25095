"""A traced program computes what the unsharded model does, on every rank, for every size it was made for."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.pipelines import CutModel, batch_of, cut, ends_of
from helpers.rank_pool import RankPool
from helpers.tiers import tiers
from models import DYNAMIC, VOCABULARY, Encoder, batch, error_of, run_ranks_of, traced_in
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext, Zero1
from tpcore.comm import mappings as ops
from tpcore.errors import BackendError
from tpcore.testing import run_ranks

# in float64, where a wrong term is larger by many orders of magnitude than another order of summation
EXACT = 1e-12


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_the_unsharded_model(pool: RankPool, tmp_path: Path, tp: int) -> None:
    model = traced_in(pool, tmp_path, lambda: Encoder(True), batch(1, 8), tp, dynamic_shapes=(DYNAMIC, DYNAMIC))
    for rows, length in ((1, 8), (3, 20), (8, 64)):
        assert error_of(model, rows, length) < EXACT
        everywhere = run_ranks_of(pool, model, [batch(rows, length)])
        assert len(everywhere) == tp
        assert all(torch.equal(a, b) for r in everywhere for a, b in zip(r[0], everywhere[0][0], strict=True))


def test_the_graph_holds_no_weights_and_no_path(pool: RankPool, tmp_path: Path) -> None:
    traced_in(pool, tmp_path, lambda: Encoder(True, hidden=256), batch(1, 8), 2)
    weights = sum(p.stat().st_size for p in tmp_path.glob("tp_rank_*/*"))
    files = list((tmp_path / "programs").rglob("*"))
    assert sum(p.stat().st_size for p in files if p.is_file()) < 60_000 < weights / 50
    text = b"".join(p.read_bytes() for p in files if p.is_file())
    for found in (b".py", str(Path(__file__).parent).encode(), str(Path(tpcore.__file__).parent).encode()):
        assert found not in text


def test_buckets_pad_and_cut_back(pool: RankPool, tmp_path: Path) -> None:
    model = traced_in(
        pool,
        tmp_path,
        lambda: Encoder(True),
        batch(2, 16),
        2,
        bucket_inputs=[batch(1, 8), batch(4, 32)],
        pad_value={"ids": 3},
    )
    assert model.manifest.programs == 3
    for rows, length in ((1, 8), (2, 9), (1, 5), (3, 32)):
        assert error_of(model, rows, length) < EXACT
    with pytest.raises(ValueError, match=r"no program takes ids"):
        model(*batch(5, 8))
    ids, mask = batch(3, 32)
    ids[0, 3] = VOCABULARY
    with pytest.raises(IndexError, match="ParallelEmbedding: an id does not fit a vocabulary of 30"):
        model(ids, mask)


class Cache(nn.Module):
    """Remembers the sum of what each rank was given: in an output that becomes a buffer, in place, or in both."""

    def __init__(self, in_place: bool, returned: bool) -> None:
        super().__init__()
        self.in_place, self.returned = in_place, returned
        self.register_buffer("total", torch.zeros(4))
        self.layer = tpcore.ColumnParallelLinear(4, 4, bias=False)
        with torch.no_grad():
            self.layer.weight.fill_(1.0)

    def forward(self, x: Tensor) -> Any:
        x = x * (1 + self.layer.tp.position)  # what is remembered is another thing on every rank
        total = self.total.add_(x) if self.in_place else self.total + x
        seen = tpcore.comm.mappings.reduce(total, self.layer.tp)
        return (self.layer(seen), total) if self.returned else self.layer(seen)


@pytest.mark.parametrize(("in_place", "returned"), [(False, True), (True, False), (True, True)])
def test_state_is_kept_from_call_to_call(pool: RankPool, tmp_path: Path, in_place: bool, returned: bool) -> None:
    def cache() -> tuple[nn.Module, dict[Tensor, int]]:
        model = Cache(in_place, returned)
        return model, {model.total: 1} if returned else {}

    model = traced_in(pool, tmp_path, cache, torch.ones(4), 2)
    calls = [(torch.full((4,), float(n)),) for n in (1, 2, 3)]
    for rank in run_ranks_of(pool, model, calls):
        assert [float(out[0][0]) for out in rank] == [12.0, 36.0, 72.0]
        assert all(len(out) == 1 for out in rank)


class Before(nn.Module):
    """Returns what it remembered, and remembers what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.last, x + 0


def test_an_output_that_is_a_state_has_its_value_before_the_call(pool: RankPool, tmp_path: Path) -> None:
    def remembering() -> tuple[nn.Module, dict[Tensor, int]]:
        model = Before()
        return model, {model.last: 1}

    model = traced_in(pool, tmp_path, remembering, torch.ones(4), 2)
    for rank in run_ranks_of(pool, model, [(torch.full((4,), float(n)),) for n in (1, 2, 3)]):
        assert [float(out[0][0]) for out in rank] == [0.0, 1.0, 2.0]


class Output(OrderedDict[str, Any]):
    """As transformers has it: to_tuple, attributes, entries that may be missing."""

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


class Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = tpcore.ColumnParallelLinear(4, 4)

    def forward(self, x: Tensor, return_dict: bool = True, *, factor: float = 1.0) -> Any:
        y = self.layer(x) * factor
        return Output(logits=y, states=(x, y)) if return_dict else (y, None)


def test_the_structure_of_outputs_comes_back(pool: RankPool, tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    model = traced_in(pool, tmp_path, Talkative, {"x": x, "factor": 2.0}, 2)
    out = model(x)
    assert list(out) == ["logits", "states"]
    assert torch.equal(out.states[1], out[0])
    assert torch.equal(out.states[0], x)
    assert torch.equal(model(x=x, factor=2.0).logits, out.logits)
    with pytest.raises(ValueError, match=r"factor=3.0, and the model was traced with 2.0"):
        model(x, factor=3.0)
    with pytest.raises(TypeError, match="'return_dict' was not given when the model was traced"):
        model(x, False)


class ByRank(nn.Module):
    """Adds the rank, as a number that Python knows: another program on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = tpcore.ColumnParallelLinear(4, 4)
        self.rank = tpcore.current().rank

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + self.rank


def test_ranks_that_need_different_programs_are_refused(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"ranks 0 and 1 would need different programs[\s\S]*\n-.*\n\+"):
        traced_in(pool, tmp_path, ByRank, torch.ones(1, 4), 2)


class Pairs(nn.Module):
    """Sums and gathers over two neighbours each, and each place among them, inside the tp group."""

    def __init__(self) -> None:
        super().__init__()
        self.tp, self.pair = tpcore.current().comm("tp"), tpcore.current().comm("tp", within=2)
        self.weight = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        both = self.pair.all_reduce(x * self.weight * self.tp.position)
        every = self.pair.all_gather(both + self.pair.position, 0)
        return self.tp.all_reduce(every * (1 + self.pair.position))


def test_groups_inside_an_axis_are_part_of_a_program(pool: RankPool, tmp_path: Path) -> None:
    model = traced_in(pool, tmp_path, Pairs, torch.ones(1, 4, dtype=torch.float64), 4)
    assert "tp/2" in json.loads((tmp_path / "programs" / "0" / "graph.json").read_text())["groups"]
    # sums of x w p are x w (0 + 1) and x w (2 + 3); each is weighted by 1 + 2, and so is each place
    x = torch.tensor([[1.0, 2.0, 3.0, -4.0]], dtype=torch.float64)
    want = 3 * 2 * (1 + 5) * x + 2 * 3 * torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    assert torch.equal(model(x), want)


def _seeded_by_rank() -> nn.Module:
    torch.manual_seed(tpcore.current().rank)
    return nn.LayerNorm(4) if tpcore.current().rank < 0 else nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("func", "error", "message"),
    [
        (
            _seeded_by_rank,
            ValueError,
            "'weight' is not sharded, and ranks 0 and 1 hold different values: .* as a buffer and take",
        ),
        (lambda: 3, TypeError, "the function to trace returned a int; it must return the model"),
        (lambda: nn.Linear(4, 4, device="meta"), ValueError, "'weight' is on the meta device"),
        (lambda: (nn.Identity(), {torch.ones(1): 0}), ValueError, r"outputs \[0\] become is no parameter"),
        (
            lambda: tpcore.ColumnParallelLinear(4, 4, gather_output=False),
            ValueError,
            r"output 0, of shape \[1, 2\], is another on rank 1 than on rank 0.*gather_output=True",
        ),
        (nn.CosineSimilarity, TypeError, "missing a required argument: 'x2'"),
    ],
)
def test_what_cannot_be_traced(pool: RankPool, tmp_path: Path, func: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        traced_in(pool, tmp_path, func, torch.ones(1, 4), 2)


def test_an_example_may_be_a_view(pool: RankPool, tmp_path: Path) -> None:
    ids, mask = batch(2, 9)
    given = ids[:, :-1], mask[:, :-1]
    model = traced_in(pool, tmp_path, lambda: Encoder(True), given, 2, dynamic_shapes=(DYNAMIC, DYNAMIC))
    for rows, length in ((2, 8), (3, 21)):
        assert error_of(model, rows, length) < EXACT


class Spread(nn.Module):
    """Sequence parallelism between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = tpcore.ParallelEmbedding(8, 4, sequence_dim=1, dtype=torch.float64)
        self.up = tpcore.ColumnParallelLinear(4, 4, sequence_dim=1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.up(self.embed(ids).tanh())
        return y


def test_sequence_parallelism_with_every_length_says_what_to_do(pool: RankPool, tmp_path: Path) -> None:
    length = {1: torch.export.Dim("length", min=2, max=64)}
    with pytest.raises(ValueError, match=r"every size of length .*without sequence_dim .* bucket_"):
        traced_in(pool, tmp_path, Spread, torch.zeros(1, 8, dtype=torch.int64), 2, dynamic_shapes=(length,))


def test_a_smaller_batch_than_every_bucket_has_says_what_to_do(pool: RankPool, tmp_path: Path) -> None:
    model = traced_in(pool, tmp_path, lambda: Encoder(True), batch(2, 4), 2, bucket_inputs=[batch(2, 8)])
    with pytest.raises(ValueError, match=r"no program takes ids .*for ids, mask trace with examples of each"):
        model(*batch(1, 4))


def test_one_tensor_may_be_the_example_of_two_inputs(pool: RankPool, tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    model = traced_in(pool, tmp_path, nn.PairwiseDistance, (x, x), 1)
    assert torch.equal(model(x, 3 * x), nn.PairwiseDistance()(x, 3 * x))


# -- what a pipeline has trained is served without stages, at any tp ----------------------------------------
IDS = batch_of(4, 9)["ids"]


class Logits(nn.Module):
    """A trained model up to its logits: what is served takes no labels."""

    def __init__(self, model: CutModel) -> None:
        super().__init__()
        self.model, self.ends = model, ends_of(tpcore.current())

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.model.embed(ids), ids.shape[1]
        mix = torch.ones(n, n, dtype=x.dtype).tril() / n
        for layer in self.model.layers:
            x = layer(x, mix)
        return ops.gather(self.model.head(self.model.norm(x)), self.ends, 2)


def _trained(ctx: ParallelContext, folder: Path) -> Tensor:
    """Its logits, after steps as two stages."""
    model = cut(4, ctx)
    pipe = tpcore.PipelineModel(model, 2)
    pipe.layers.shared = ["mix"]
    optimizer = Zero1(torch.optim.AdamW, model.named_parameters(), lr=0.05)
    for step in range(2):
        pipe.run_train(**batch_of(4, step))
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, folder)
    with torch.no_grad():
        return Logits(model)(IDS)


def _loaded(folder: Path, piped: bool) -> nn.Module:
    """The class that was trained. ``piped``: its pipeline too, as it was written for training."""
    model = cut(4, tpcore.current())
    if piped:
        model.layers = tpcore.PipelinedLayers(model.layers, 2, shared=["mix"])
    tpcore.checkpoint.load(folder, model)
    return Logits(model)


@pytest.mark.parametrize("piped", tiers([True], [False]))
def test_a_checkpoint_of_stages_is_traced_and_served_at_any_tp(pool: RankPool, tmp_path: Path, piped: bool) -> None:
    """The vocabulary is sharded over pp x tp, as in training, and batches are of any size."""
    want, *_ = run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 2}), lambda ctx: _trained(ctx, tmp_path / "c"))
    sizes = ({0: torch.export.Dim("rows", min=1, max=8)},)
    for tp in (1, 2, 4):
        folder, load = tmp_path / f"tp{tp}", partial(_loaded, tmp_path / "c", piped)
        with traced_in(pool, folder, load, (IDS,), tp, dynamic_shapes=sizes) as served:
            for rows in (4, 1, 3):
                # 1e-12: float64 through a few layers
                torch.testing.assert_close(served(IDS[:rows]), want[:rows], rtol=1e-12, atol=1e-12)
