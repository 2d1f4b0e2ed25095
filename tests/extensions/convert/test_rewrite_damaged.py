"""Commands on damaged files and full disks: ``verify`` names what is wrong, and what a command left is removed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import values
from helpers.killed_saves import Counted
from safetensors.torch import save_file
from test_checkpoint import kept_by
from test_checkpoint_fuzz import BESIDE, COUNTS, bounded, device, fifo, huge, mutated, refused_for_its_size, saved
from test_checkpoint_unsharded import MiB, grown
from test_leftovers import die, home, one

from tpcore.checkpoint.read.source import ShardRule
from tpcore.checkpoint.storage import files
from tpcore.errors import CheckpointError
from tpcore_convert.inspect import verify
from tpcore_convert.rewrite import consolidate, convert, reshard

__all__ = ["bounded", "home", "saved"]  # fixtures of the tests of checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning", "ignore::DeprecationWarning")


def _whole(path: Path) -> Path:
    consolidate(path, path.with_name("whole"))
    return path.with_name("whole")


test_any_spec_from_any_degree_to_any_offline = kept_by(reshard, _whole)


@pytest.mark.parametrize("what", BESIDE)
def test_pickles_of_shards_that_make_much_of_little(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "c" / "tp_rank_0"
    folder.mkdir(parents=True)
    refused_for_its_size(folder / "checkpoint.pt", tmp_path / "c", what)


@COUNTS
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("bounded")
def test_mutated_pickles(tmp_path: Path, count: int) -> None:
    """Whole files and shards of another library. What ``verify`` finds nothing wrong with is right.

    Loading alone cannot tell: torch does not compare its checksums, and a rank reads its part only.
    """
    g = torch.Generator().manual_seed(0)
    want = {f"{i}.weight": torch.randn(4, 3, generator=g) for i in range(3)}
    torch.save({"model": want, "epoch": 1}, tmp_path / "whole.pt")
    for rank in range(2):
        (tmp_path / "c" / f"tp_rank_{rank}").mkdir(parents=True)
        state = {name: t.chunk(2)[rank].clone() for name, t in want.items()}
        torch.save({"model": state}, tmp_path / "c" / f"tp_rank_{rank}" / "checkpoint.pt")
    files = sorted(tmp_path.rglob("*.pt"))
    rules = [ShardRule("*", 0)]
    draw = random.Random(1)
    refused = 0
    for i in range(count // 2):
        target = draw.choice(files)
        path = target if target.parent == tmp_path else tmp_path / "c"
        original = target.read_bytes()
        # in place: what is mapped by then would fault, as with any file that is cut while it is read
        target.unlink()
        target.write_bytes(mutated(original, draw))
        try:
            found = values(path, rules if path.is_dir() else [])
            if not verify(path, rules=rules if path.is_dir() else []):
                assert all(torch.equal(found[name], t) for name, t in want.items()), (i, target)
            else:
                refused += 1
        except CheckpointError:
            refused += 1
        finally:
            target.unlink()
            target.write_bytes(original)
    assert refused > count // 4


@pytest.mark.parametrize("how", [fifo, device, huge])
@pytest.mark.parametrize("name", ["manifest.json", "tp_rank_0/state.json", "tp_rank_0/model.safetensors"])
def test_special_files_are_named(saved: Path, name: str, how: Callable[[Path], None]) -> None:
    how(saved / name)
    assert any(name in problem for problem in verify(saved))


@pytest.mark.parametrize("how", [fifo, device])
def test_special_files_beside_weights(tmp_path: Path, how: Callable[[Path], None]) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").touch()
    how(tmp_path / "config.json")
    assert verify(tmp_path) == []


REWRITE = """
from tpcore_convert import rewrite
os.fsync = killed
rewrite.{}(sys.argv[1], sys.argv[2])
"""


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
def test_a_command_again_removes_what_it_left(home: Path, tmp_path: Path) -> None:
    one(tmp_path / "c", 1)
    torch.save({"w": torch.ones(3)}, tmp_path / "whole.pt")
    for command, source, out in (
        (consolidate, tmp_path / "c", home / "whole"),
        (convert, tmp_path / "whole.pt", home / "whole.safetensors"),
    ):
        die(tmp_path, REWRITE.format(command.__name__), source, out)
        assert any(name.startswith(f".{out.name}.writing-") for name in os.listdir(home))
        command(source, out)
    assert sorted(os.listdir(home)) == ["whole", "whole.safetensors"]


@pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")
def test_a_command_that_fails_in_a_write_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    def opened(path: str, mode: str) -> Any:
        f = open(path, mode)  # noqa: SIM115  whoever opens it closes it
        return Counted(f, full) if "x" in mode else f

    one(tmp_path / "c", 1)
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    monkeypatch.setattr(files, "open", opened, raising=False)
    for run in (
        lambda: consolidate(tmp_path / "c", home / "x"),
        lambda: reshard(tmp_path / "c", home / "x", 2),
        lambda: convert(tmp_path / "w.pt", home / "x.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left"):
            run()
        assert os.listdir(home) == []


LARGEST, COUNT = 16 * MiB, 24  # 384 MiB in all


@pytest.mark.slow
def test_peaks_do_not_grow_with_the_total(tmp_path: Path) -> None:
    rows = LARGEST // 4096 // 4
    t = torch.arange(rows * 4096, dtype=torch.float32).view(rows, 4096)
    save_file({str(i): t + i for i in range(COUNT)}, tmp_path / "whole.safetensors")
    rules = [ShardRule(str(i), i % 2) for i in range(COUNT)]  # half of them along rows, half along columns
    steps: dict[str, Callable[[], Any]] = {
        "cut": lambda: reshard(tmp_path / "whole.safetensors", tmp_path / "2", 2, rules=rules),
        "reshard": lambda: reshard(tmp_path / "2", tmp_path / "4", 4),
        "consolidate": lambda: consolidate(tmp_path / "4", tmp_path / "out"),
    }
    peaks = {name: grown(run) for name, run in steps.items()}
    # far below the 256 MiB beyond twice the largest tensor that are allowed, and below a quarter of the total
    assert all(peak < 2 * LARGEST + 64 * MiB for peak in peaks.values()), peaks
