"""A Zero1 reads its own entries out of a checkpoint, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero_checkpoint import AdamW, Wide, stepped
from torch import Tensor, nn
from worlds import each_rank

from tpcore import CheckpointError, Mesh, ParallelContext, Zero1
from tpcore.checkpoint import load, save
from tpcore.checkpoint.storage.tensorfile import FileTensor
from tpcore.testing import run_ranks


@pytest.mark.parametrize(("there", "alone"), [((2, 2), False), ((4, 1), True), ((3, 2), False), ((1, 1), True)])
def test_a_load_reads_this_ranks_entries_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[int, int], alone: bool
) -> None:
    """Of each moment and master 1/dp of the shard, and no tensor of a shard's shape is ever made."""

    def write(ctx: ParallelContext) -> None:
        model, optimizer = stepped(torch.bfloat16, 2)
        save({"model": model.state_dict(), "optimizer": optimizer, "epoch": 5}, tmp_path / "c")

    run_ranks(Mesh({"dp": 2, "tp": 2}), write)
    read, amounts = FileTensor.read, list[tuple[str, int]]()

    def counted(self: FileTensor, starts: Any, out: Tensor, check: bool) -> None:
        amounts.append((self.file.path, out.numel()))
        read(self, starts, out, check)

    monkeypatch.setattr(FileTensor, "read", counted)

    def fresh(ctx: ParallelContext) -> Zero1:
        model = Wide().bfloat16()
        made = Zero1(AdamW, model.named_parameters(), master_dtype=torch.float32)
        if alone:
            rest = load(tmp_path / "c", made, model_key="optimizer")
            assert rest.keys() == {"model", "epoch"}
        else:
            assert load(tmp_path / "c", model, optimizer=made) == {"epoch": 5}
        return made

    dp, tp = there
    mesh = Mesh({"dp": dp, "tp": tp})
    states = run_ranks(mesh, lambda ctx: fresh(ctx).state_dict()["state"])
    entries = 64 * 16 // tp
    moments = [n for path, n in amounts if "optimizer.dp" in path]
    assert sum(moments) == dp * tp * 6 * 3 * entries // dp  # none is read twice
    assert max(moments) <= -(-entries // dp)

    def check(ctx: ParallelContext) -> None:
        want = load(tmp_path / "c", Wide().bfloat16())["optimizer"]["state"]
        for number, values in states[ctx.rank].items():
            assert values.keys() == want[number].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
            for key, value in values.items():
                assert torch.equal(value, want[number][key])

    run_ranks(mesh, check)


def test_a_moment_that_is_damaged_is_found_by_the_rank_that_compares_it(tmp_path: Path) -> None:
    def write(ctx: ParallelContext) -> None:
        model, optimizer = stepped(torch.float32, 1)
        save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "c")

    run_ranks(Mesh({"dp": 2, "tp": 1}), write)
    (file,) = (tmp_path / "c").glob("tp_rank_*/optimizer.dp1.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)

    def read(ctx: ParallelContext) -> None:
        model = Wide()
        for p in model.parameters():
            nn.init.zeros_(p)
        optimizer = Zero1(AdamW, model.named_parameters())
        with pytest.raises(CheckpointError, match="is damaged: its crc32"):
            load(tmp_path / "c", model, optimizer=optimizer)
        assert not any(p.any() for p in model.parameters())
        assert not optimizer.state

    run_ranks(Mesh({"dp": 2, "tp": 1}), read)


@each_rank(dp=1, tp=1)
def test_an_optimizer_goes_with_a_model(ctx: ParallelContext, tmp_path: Path) -> None:
    model, optimizer = stepped(torch.float32, 1)
    save({"model": model.state_dict()}, tmp_path / "c")
    with pytest.raises(ValueError, match="goes with a model"):
        load(tmp_path / "c", optimizer=optimizer)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    stepped(torch.float32, 1, (model, optimizer))
    changed = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match="has no entry 'optimizer'; it has "):
        load(tmp_path / "c", model, optimizer=optimizer)
    for name, value in model.state_dict().items():  # left as it was
        assert torch.equal(value, changed[name])
        assert not torch.equal(value, before[name])
