"""Checkpoints written and read back, at the same degree and at others."""

from __future__ import annotations

import json
import math
import os
import stat
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import edit, values
from helpers.worlds import each_rank
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from test_shard import DEGREES, fits, specs
from torch import Tensor, nn

import tpcore
from tpcore.checkpoint import load, save, stored
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.layout.shard import ShardSpec
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = pytest.mark.usefixtures("no_fsync")

NAMED = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
"""Dtypes that have a name in every release of safetensors."""
OTHERS = "float8_e5m2fnuz uint16 uint32 uint64 complex64 complex128"
DTYPES = [getattr(torch, name) for name in f"{NAMED} {OTHERS}".split()]


class Net(nn.Module):
    """Every kind of cut: rows, columns, fused, padded, replicated, none; a tie; buffers."""

    def __init__(self, device: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options: Any = {"device": device, "dtype": dtype, "pad": True}
        self.embedding = tpcore.ParallelEmbedding(10, 8, **options)
        self.qkv = tpcore.ColumnParallelLinear(8, 18, blocks=3, **options)
        self.out = tpcore.RowParallelLinear(6, 8, **options)
        self.sequence_norm = tpcore.LayerNorm(8, device=device, dtype=dtype)
        self.norm = nn.BatchNorm1d(8, device=device, dtype=dtype)
        self.head = tpcore.ColumnParallelLinear(8, 10, **options)
        self.head.weight = self.embedding.weight


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW after two steps, its gradients a function of the parameter's place in the full tensor."""
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    step(model, optimizer)
    step(model, optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = torch.sin(p.detach() * 7)  # elementwise: the same at every degree
    optimizer.step()


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    return bool(a == b)


def _bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().resolve_conj().reshape(-1).view(torch.uint8)


def round_trip(state: dict[Any, Any], path: Path, mesh: Mesh | None = None) -> Any:
    def both(ctx: ParallelContext) -> Any:
        save(state, path)
        return load(path)

    return run_ranks(mesh or Mesh({"tp": 1}), both)[0]


# -- what comes back ----------------------------------------------------------------------------------------
def test_everything_comes_back(tmp_path: Path) -> None:
    def train(ctx: ParallelContext) -> None:
        model = net()
        optimizer = trained(model)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": tpcore.random.get_state(),
            "epoch": 3,
            "loss": 0.5,
        }
        save(state, tmp_path / "c")
        again = load(tmp_path / "c")
        assert same(again, state)
        fresh = net(seed=ctx.rank + 1)
        rest = load(tmp_path / "c", fresh)
        assert same(rest, {k: v for k, v in state.items() if k != "model"})
        assert same(fresh.state_dict(), model.state_dict())
        other = torch.optim.AdamW(fresh.named_parameters())
        other.load_state_dict(rest["optimizer"])
        step(model, optimizer)
        step(fresh, other)
        assert same(fresh.state_dict(), model.state_dict())

    run_ranks(Mesh({"dp": 2, "tp": 2}), train)
    assert sorted(os.listdir(tmp_path)) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", "tp_rank_0", "tp_rank_1"]


def test_values_of_every_kind(tmp_path: Path) -> None:
    state = {
        "numbers": [0, -1, 2**70, 0.1, -0.0, math.inf, -math.inf, 5e-324, True, False, None],
        "nested": {"$": "a key of ours", "": {}, "list": [], "tuple": (), "deep": ((1, [2, (3,)]),)},
        "keys": {0: "int", -1.5: "float", True: "bool", None: "none", (1, "a"): "tuple", "x": "str"},
        "types": [OrderedDict(b=1, a=2), Counter({3: 2}), torch.bfloat16],
        "text": "\u00e9\u4e2d\U0001f600\x00\n\ud800",
        7: "an int key on top",
    }
    back = round_trip(state, tmp_path / "c")
    assert same(back, state)
    assert math.isnan(round_trip({"x": math.nan}, tmp_path / "d")["x"])


def test_tensors_of_every_kind(tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (6, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        full = raw.bool() if dtype == torch.bool else raw.flatten().view(dtype).view(6, 4, -1)
        state[str(dtype)] = {
            "full": full,
            "columns": full[:, 1:3],
            "transposed": full.transpose(0, 1),
            "empty": full[:0],
            "scalar": full[0, 0, 0],
        }
    state["conjugate"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state["expanded"] = torch.tensor([1.0, 2.0]).expand(3, 2)
    state["parameter"] = nn.Parameter(torch.ones(2)).detach()
    assert same(round_trip(state, tmp_path / "c"), state)
    files = [load_file(file) for file in (tmp_path / "c" / "tp_rank_0").glob("*.safetensors")]
    for name in NAMED.split():
        assert any(same(file.get("full"), state[f"torch.{name}"]["full"]) for file in files), name


def test_ties_are_written_once(tmp_path: Path) -> None:
    a, b = torch.arange(4.0), torch.arange(4.0)
    back = round_trip({"x": {"a": a, "tied": a, "view": a.view(2, 2), "b": b}, "y": [a]}, tmp_path / "c")
    assert back["x"]["a"] is back["x"]["tied"] is back["y"][0]
    assert back["x"]["a"] is not back["x"]["b"]
    assert set(load_file(tmp_path / "c/tp_rank_0/x.safetensors")) == {"a", "view", "b"}


def test_names_that_collide_stay_apart(tmp_path: Path) -> None:
    t = [torch.tensor(float(i)) for i in range(8)]
    state = {
        "a": {"b": {"c": t[0]}, "b.c": t[1], "B.C": t[2], "__metadata__": t[3]},
        "A": {"x": t[4]},
        "../up": {"x": t[5]},
        "tensors": {"top": t[6]},
        "top": t[7],
    }
    assert same(round_trip(state, tmp_path / "c"), state)
    assert all(f.parent == tmp_path / "c/tp_rank_0" for f in tmp_path.rglob("*.safetensors"))


@each_rank(tp=2)
def test_a_flat_model_state(ctx: ParallelContext, tmp_path: Path) -> None:
    model = net()
    save(model.state_dict(), tmp_path / "c")
    back = load(tmp_path / "c")
    assert same(back, model.state_dict())
    assert back._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    other = net(seed=1)
    assert load(tmp_path / "c", other) == {}
    assert same(other.state_dict(), model.state_dict())


@each_rank(tp=1)
def test_arguments_that_would_be_ignored(ctx: ParallelContext, tmp_path: Path) -> None:
    for bad in (
        {"background": True, "in_turn": True},
        {"dtype": torch.int8},
        {"dtype": torch.float64},
        {"keep_last": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            save({}, tmp_path / "c", **bad)
    with pytest.raises(ValueError, match="sharded"):
        load(tmp_path / "c", sharded=False)
    assert os.listdir(tmp_path) == []


@each_rank(tp=1)
def test_down_cast(ctx: ParallelContext, tmp_path: Path) -> None:
    state = {"x": {"w": torch.randn(4), "step": torch.tensor(1001.0), "d": torch.randn(2).double()}}
    save(state, tmp_path / "c", dtype=torch.bfloat16)
    x = load(tmp_path / "c")["x"]
    assert same(x, state["x"] | {"w": state["x"]["w"].bfloat16()})


# -- the files ----------------------------------------------------------------------------------------------
def test_files_are_plain(tmp_path: Path) -> None:
    """Every file opens with safetensors or json; names are those of the model; modes follow the umask."""

    def check(ctx: ParallelContext) -> dict[str, Tensor]:
        model = net()
        save({"model": model.state_dict(), "epoch": 1}, tmp_path / "new" / "dir" / "c")
        return model.state_dict()

    old = os.umask(0o027)
    try:
        states = run_ranks(Mesh({"tp": 2}), check)
    finally:
        os.umask(old)
    top = tmp_path / "new" / "dir" / "c"
    manifest = json.loads((top / "manifest.json").read_text())
    listed = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    assert listed == {str(p.relative_to(top)): p.stat().st_size for p in top.rglob("tp_rank_*/*")}
    assert manifest["mesh"] == {"tp": 2}
    for rank, state in enumerate(states):
        plain = load_file(top / f"tp_rank_{rank}/model.safetensors")
        assert set(state) - set(plain) == {"head.weight"}
        assert all(torch.equal(plain[name], state[name]) for name in plain)
        with safe_open(top / f"tp_rank_{rank}/model.safetensors", "pt") as f:
            assert f.metadata()["save_id"] == manifest["save_id"]
    for path in [top, *top.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path


# -- other degrees ------------------------------------------------------------------------------------------
def _train_and_save(ctx: ParallelContext, path: Path) -> None:
    model = net()
    optimizer = trained(model)
    rng = torch.arange(8, dtype=torch.uint8)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng, "n": [1]}, path)


def _continue(ctx: ParallelContext, path: Path, device: str | None) -> dict[str, Tensor]:
    """One more step from the checkpoint; the full tensors of the result, padding looked at as well."""
    model = net(seed=9, device=device)
    rest = load(path, model)
    assert not any(t.is_meta for t in model.state_dict().values())
    assert model.head.weight is model.embedding.weight
    assert rest["n"] == [1]
    assert torch.equal(rest["rng"], torch.arange(8, dtype=torch.uint8))
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    optimizer.load_state_dict(rest["optimizer"])
    step(model, optimizer)
    out = {}
    for name, t in model.state_dict().items():
        spec = tpcore.layers.shard_specs(model)[name]
        shards = [t] if ctx.mesh.axes["tp"] == 1 else list(ctx.comm("tp").all_gather(t[None], 0))
        out[name] = spec.unshard(shards) if spec.dim is not None else t
        if spec.dim is not None:
            assert torch.equal(spec.shard(out[name], ctx.coord("tp"), len(shards)), t)  # zeros in the padding
    return out


@pytest.mark.parametrize(("a", "device"), [(1, None), (2, "meta"), (3, None)])
def test_training_goes_on_at_any_degree(a: int, device: str | None, tmp_path: Path) -> None:
    def write(ctx: ParallelContext) -> None:
        _train_and_save(ctx, tmp_path / "c")

    run_ranks(Mesh({"dp": 2 if a == 2 else 1, "tp": a}), write)
    reference: dict[str, Tensor] | None = None
    for b in (1, 2, 4):
        results = run_ranks(
            Mesh({"dp": 2 if b < 4 else 1, "tp": b}), lambda ctx: _continue(ctx, tmp_path / "c", device)
        )
        reference = reference or results[0]
        for result in results:
            assert same(result, reference)


def test_resharded_and_saved_again(tmp_path: Path) -> None:
    """What load returns without a model knows its cuts, so that 2 -> 3 -> 2 gives the same bytes."""

    def resave(ctx: ParallelContext, have: Path, want: Path) -> None:
        save(load(have), want)

    run_ranks(Mesh({"tp": 2}), lambda ctx: _train_and_save(ctx, tmp_path / "2"))
    run_ranks(Mesh({"tp": 3}), lambda ctx: resave(ctx, tmp_path / "2", tmp_path / "3"))
    run_ranks(Mesh({"tp": 2}), lambda ctx: resave(ctx, tmp_path / "3", tmp_path / "22"))
    for rank in range(2):
        for file in ("model", "optimizer"):
            a, b = (load_file(tmp_path / d / f"tp_rank_{rank}/{file}.safetensors") for d in ("2", "22"))
            assert same(a, b)


@pytest.mark.parametrize(("a", "b"), [(2, 1), (1, 2)])
def test_optimizer_without_names(a: int, b: int, tmp_path: Path) -> None:
    """Its moments are of unknown cut: as they were at the same degree, an error at another, and a warning
    while they can still be named."""

    def write(ctx: ParallelContext) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "n": 1}, tmp_path / "c")
        assert same(load(tmp_path / "c")["optimizer"], optimizer.state_dict())

    def read(ctx: ParallelContext) -> None:
        model = net(seed=1)
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(CheckpointError, match=rf"optimizer\.state\[0\]\.exp_avg .* tp={a}.*named_parameters"):
            load(tmp_path / "c", model)
        assert all(map(torch.equal, before, model.parameters()))
        if ctx.rank == 0:
            with pytest.warns(UserWarning, match="left out: optimizer"):
                rest = load(tmp_path / "c", model, strict=False)
        else:
            rest = load(tmp_path / "c", model, strict=False)
        assert rest == {"n": 1}

    with pytest.warns(UserWarning, match=r"'optimizer' is saved without .* at another degree.*named_param"):
        run_ranks(Mesh({"tp": a}), write)
    run_ranks(Mesh({"tp": b}), read)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda rank: {"a": {"b": torch.tensor([rank])}}, r"a\.b .*tp=2.*different values"),
        (lambda rank: {"a": {"b": [0, rank]}}, r"a\.b\[1\] .*tp=2: it is 0 of tp rank 0, 1 of 1"),
    ],
)
def test_entries_that_differ_between_ranks(state: Any, message: str, tmp_path: Path) -> None:
    run_ranks(Mesh({"tp": 2}), lambda ctx: save(state(ctx.rank), tmp_path / "c"))
    back = run_ranks(Mesh({"tp": 2}), lambda ctx: load(tmp_path / "c"))
    assert [same(back[rank], state(rank)) for rank in range(2)] == [True, True]
    with pytest.raises(CheckpointError, match=message):
        run_ranks(Mesh({"tp": 3}), lambda ctx: load(tmp_path / "c"))


# -- the law ------------------------------------------------------------------------------------------------
class _Any(tpcore.ParallelModule):
    """A module whose parameters are cut as given."""

    def __init__(self, specs: list[ShardSpec], dtype: torch.dtype, device: str | None) -> None:
        super().__init__()

        for i, spec in enumerate(specs):
            self.shard_parameter(f"p{i}", spec, _counted, dtype, device)


def _counted(t: Tensor) -> Tensor:
    return t.copy_(torch.arange(1, t.numel() + 1).reshape(t.shape))


def kept_by(reshard: Callable[[Path, Path, int], object], whole: Callable[[Path], Path]) -> Callable[[], None]:
    """A test: saved at one degree, rewritten by ``reshard`` for another and back, loaded at a third, and whole."""

    @given(
        st.lists(specs(), min_size=1, max_size=3),
        st.tuples(st.integers(1, 4), DEGREES, st.integers(1, 4)),
        st.sampled_from([torch.float64, torch.bfloat16, torch.complex128]),
        st.sampled_from([None, "meta"]),
        st.sampled_from([1, 24, 8 << 20]),  # bytes that are made and written at once
    )
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
    def kept(
        specs: list[ShardSpec], degrees: tuple[int, int, int], dtype: torch.dtype, device: str | None, chunk: int
    ) -> None:
        assume(all(fits(spec, n) for spec in specs for n in degrees))
        a, b, c = degrees

        def write(ctx: ParallelContext, path: Path) -> None:
            state = _Any(specs, dtype, None).state_dict()
            save({"model": state, "tied": state["p0"]}, path)

        def read(ctx: ParallelContext, path: Path) -> None:
            model, want = _Any(specs, dtype, device), _Any(specs, dtype, None).state_dict()
            for p in model.parameters():
                p.detach().fill_(-1)
            rest = load(path, model)
            assert same(model.state_dict(), want)
            assert same(rest, {"tied": want["p0"]})

        with tempfile.TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch:
            patch.setattr(stored, "CHUNK", chunk)
            run_ranks(Mesh({"tp": a}), lambda ctx: write(ctx, Path(home, "a")))
            reshard(Path(home, "a"), Path(home, "b"), b)
            run_ranks(Mesh({"tp": c}), lambda ctx: read(ctx, Path(home, "b")))
            reshard(Path(home, "b"), Path(home, "again"), a)
            full = {f"p{i}": _counted(torch.empty(spec.shape, dtype=dtype)) for i, spec in enumerate(specs)}
            if dtype != torch.complex128:  # which safetensors has no name for
                assert same(values(whole(Path(home, "again"))), full)

    return kept


def _saved_again(have: Path, want: Path, tp: int) -> None:
    run_ranks(Mesh({"tp": tp}), lambda ctx: save(load(have), want))


test_any_spec_from_any_degree_to_any = kept_by(_saved_again, lambda path: path)


def test_pipeline_ranks_have_directories_of_their_own(tmp_path: Path) -> None:
    def write(ctx: ParallelContext) -> None:
        save({"stage": ctx.coord("pp"), "w": torch.tensor([ctx.coord("tp")])}, tmp_path / "c")

    run_ranks(Mesh({"pp": 2, "dp": 2, "tp": 2}), write)
    ranks = [f"tp_rank_{t}_pp_rank_{p}" for t in range(2) for p in range(2)]
    assert sorted(os.listdir(tmp_path / "c")) == ["manifest.json", *ranks]
    for rank, found in enumerate(run_ranks(Mesh({"pp": 2, "tp": 2}), lambda ctx: load(tmp_path / "c"))):
        assert found["stage"] == rank // 2
        assert found["w"].tolist() == [rank % 2]
    with pytest.raises(CheckpointError, match=r"stage .* at the degree .* pp=2: it is 0 .*, 1 of 0 of stage"):
        run_ranks(Mesh({"tp": 2}), lambda ctx: load(tmp_path / "c"))
    run_ranks(Mesh({"pp": 2, "tp": 1}), lambda ctx: save({"rng": torch.tensor([ctx.coord("pp")])}, tmp_path / "rng"))
    with pytest.raises(CheckpointError, match=r"rng can be loaded only .* pp=2: stages 0 and 1"):
        run_ranks(Mesh({"tp": 1}), lambda ctx: load(tmp_path / "rng"))


@each_rank(dp=1, tp=1)
def test_a_checkpoint_of_a_newer_version_is_the_latest_and_refused(ctx: ParallelContext, tmp_path: Path) -> None:
    """An older one in its place would lose steps in silence."""
    for step in (1, 2):
        save({"model": {"p": torch.ones(2)}}, tmp_path / f"step_{step}")
    edit(tmp_path / "step_2" / "manifest.json", lambda top: top.update(version=99))
    assert tpcore.checkpoint.latest(tmp_path) == str(tmp_path / "step_2")
    with pytest.raises(CheckpointError, match="version 99"):
        load(tmp_path / "step_2")
