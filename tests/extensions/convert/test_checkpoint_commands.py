"""`tpcore checkpoint`: what each command writes and prints, and that bad input leaves nothing behind."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from test_pipeline import assert_opens_on_any_mesh, whole_state
from torch import Tensor, nn
from typer.testing import CliRunner

import tpcore
from tpcore.checkpoint import load, save
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.read.source import opened, tensors_of, unsharded
from tpcore.cli.app import app
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

pytestmark = [pytest.mark.usefixtures("no_fsync"), pytest.mark.filterwarnings("ignore:.*is a pickle.*:UserWarning")]


class Net(nn.Module):
    """Fused, padded, replicated and tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = tpcore.ParallelEmbedding(7, 4, pad=True)
        self.gate_up = tpcore.ColumnParallelLinear(4, 8, blocks=2)
        self.norm = nn.LayerNorm(4)
        self.head = tpcore.ColumnParallelLinear(4, 7, bias=False, pad=True)
        self.head.weight = self.embed.weight


def write(path: Path, tp: int, seed: int = 0, bias: float = 0.0) -> dict[str, Tensor]:
    """Save a net and its optimizer after a step; the whole values, which are those at every degree."""

    def one(ctx: ParallelContext) -> None:
        tpcore.random.manual_seed(seed)
        net = Net()
        optimizer = torch.optim.AdamW(net.named_parameters(), lr=0.0)
        for p in net.parameters():
            p.grad = p.detach().clone()
        optimizer.step()
        with torch.no_grad():
            net.norm.bias += bias
        save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, path)

    run_ranks(Mesh({"tp": tp}), one)
    whole: dict[str, Tensor] = {}

    def alone(ctx: ParallelContext) -> None:
        net = Net()
        load(path, net)
        whole.update({k: v.clone() for k, v in net.state_dict().items()})

    run_ranks(Mesh({"tp": 1}), alone)
    return whole


def saved(path: Path, tp: int, state: Callable[[ParallelContext], dict[str, Any]]) -> None:
    run_ranks(Mesh({"tp": tp}), lambda ctx: save(state(ctx), path))


def run(*words: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_consolidate(tp: int, tmp_path: Path) -> None:
    want = write(tmp_path / "c", tp)
    run("consolidate", tmp_path / "c", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == want.keys() - {"head.weight"}  # once: it is tied
    assert all(torch.equal(found[name], want[name]) for name in found)
    assert run("diff", tmp_path / "c", tmp_path / "out") == "the same\n"

    def plain(ctx: ParallelContext) -> None:
        net = nn.ModuleDict({"gate_up": nn.Linear(4, 8)})
        load(tmp_path / "c", net, strict=False)
        assert all(torch.equal(t, want[name]) for name, t in net.state_dict().items())

    with pytest.warns(UserWarning, match="does not fit the model everywhere|left out: "):
        run_ranks(Mesh({"tp": 2}), plain)


def written_by_others(full: dict[str, Tensor], stages: int, path: Path) -> None:
    """The table on the first stage, head and norm on the last, each sharded over tp alone."""
    for stage, rank in itertools.product(range(stages), range(2)):
        part: dict[str, Tensor] = {}
        for name, value in full.items():
            number = int(name.split(".")[1]) if name.startswith("layers") else -1
            at = number * stages // 4 if number >= 0 else 0 if name.startswith("embed") else stages - 1
            dim = 1 if "down.weight" in name else 0 if "norm" not in name and "down" not in name else None
            if at == stage:
                part[name] = value if dim is None else value.chunk(2, dim)[rank].clone()
        folder = path / f"tp_rank_{rank:02d}_pp_rank_{stage:02d}"
        folder.mkdir(parents=True)
        torch.save({"model": part, "epoch": 3}, folder / "checkpoint.pt")


@pytest.mark.parametrize("stages", [1, 4])
def test_stages_of_others_open_on_any_mesh(tmp_path: Path, stages: int) -> None:
    written_by_others(whole_state(False), stages, tmp_path / "c")
    assert_opens_on_any_mesh(tmp_path / "c", False)


def test_all_that_lies_beside_weights_in_a_folder_of_transformers_travels(tmp_path: Path) -> None:
    """A checkpoint in a run's folder, as a Trainer leaves it: the tokenizer keeps its special tokens."""
    run_folder = tmp_path / "run"
    write(run_folder / "c", 2)
    beside = {
        "config.json": "{}",
        "generation_config.json": "{}",
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"bos_token": "<s>"}',
        "special_tokens_map.json": "{}",
        "processor_config.json": "{}",
        "video_preprocessor_config.json": "{}",
        "sentencepiece.bpe.model": "",
        "merges.txt": "",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "{{ tools }}",
        "modeling_mine.py": "",
    }
    others = "model.safetensors.index.json model-00001-of-00002.safetensors pytorch_model.bin optimizer.pt "
    others += "training_args.bin rng_state_0.pth trainer_state.json .cache tf_model.h5 runs/log"
    for name in (*beside, *others.split()):
        (run_folder / name).parent.mkdir(exist_ok=True)
        (run_folder / name).write_text(beside.get(name, "not copied"))
    run("consolidate", run_folder / "c", tmp_path / "out")
    found = {str(f.relative_to(tmp_path / "out")) for f in (tmp_path / "out").rglob("*") if f.is_file()}
    assert found == {"model.safetensors", *beside}
    assert all((tmp_path / "out" / name).read_text() == text for name, text in beside.items())


def test_several_files_and_pickles(tmp_path: Path) -> None:
    want = write(tmp_path / "c", 2)
    said = json.loads(run("consolidate", tmp_path / "c", tmp_path / "o", "--max-shard-size", "128B", "--json"))
    assert said["files"][-1] == "model.safetensors.index.json"
    assert sorted(said["files"]) == sorted(os.listdir(tmp_path / "o"))
    index = json.loads((tmp_path / "o" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "o" / file)[name], want[name])
        assert (tmp_path / "o" / file).stat().st_size < 128 + 600
    run("consolidate", tmp_path / "c", tmp_path / "pt", "-f", "pytorch")
    assert os.listdir(tmp_path / "pt") == ["pytorch_model.bin"]
    found = torch.load(tmp_path / "pt" / "pytorch_model.bin", weights_only=True)
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert run("diff", tmp_path / "o", tmp_path / "pt") == "the same\n"
    run("convert", tmp_path / "pt" / "pytorch_model.bin", bare := tmp_path / "x.safetensors")
    assert run("verify", tmp_path / "pt" / "pytorch_model.bin").endswith("complete and undamaged\n")
    assert run("verify", bare).endswith(f"complete; without checksums, so that flipped bits do not show: {bare}\n")
    assert run("diff", tmp_path / "c", tmp_path / "x.safetensors", "--no-trust") == "the same\n"


def test_reshard(tmp_path: Path) -> None:
    """To 4, to 3, to 1, to 2: what is there then is what was there, optimizer included."""
    want = write(tmp_path / "2", 2)
    before = tmp_path / "2"
    for tp in (4, 3, 1, 2):
        run("reshard", before, tmp_path / f"to{tp}", "--tp", tp)
        before = tmp_path / f"to{tp}"
        assert run("verify", before) == f"{before}: complete and undamaged\n"

    def same(ctx: ParallelContext) -> None:
        a, b = load(tmp_path / "2"), load(tmp_path / "to2")
        assert a["epoch"] == b["epoch"]
        assert all(torch.equal(a["model"][name], b["model"][name]) for name in want)
        assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
        for i, values in a["optimizer"]["state"].items():
            assert all(torch.equal(v, b["optimizer"]["state"][i][k]) for k, v in values.items())

    run_ranks(Mesh({"tp": 2}), same)


def test_what_is_bound_to_its_degree(tmp_path: Path) -> None:
    saved(tmp_path / "c", 2, lambda ctx: {"model": {"w": torch.ones(2)}, "mine": torch.tensor([ctx.rank])})
    run("reshard", tmp_path / "c", tmp_path / "out", "--tp", 4, status=2)
    assert os.listdir(tmp_path) == ["c"]
    assert "left out: mine" in run("reshard", tmp_path / "c", tmp_path / "out", "--tp", 4, "--no-strict")


def test_heads_that_a_degree_cannot_replicate_are_refused_by_name(tmp_path: Path) -> None:
    heads = [tpcore.Block(16, 4), tpcore.Block(8, 4, replicate=True)]
    layers = partial(tpcore.ColumnParallelLinear, 4, 24, blocks=heads)
    saved(tmp_path / "c", 2, lambda ctx: {"model": nn.ModuleDict({"qkv": layers()}).state_dict()})
    said = run("reshard", tmp_path / "c", tmp_path / "out", "--tp", 3, status=2)
    assert "model.qkv.weight" in said
    assert "cannot replicate 2 units over 3 ranks" in said
    assert os.listdir(tmp_path) == ["c"]


def test_inspect(tmp_path: Path) -> None:
    write(tmp_path / "c", 2)
    table = run("inspect", tmp_path / "c")
    assert "tpcore checkpoint, tp=2" in table
    found = json.loads(run("inspect", tmp_path / "c", "--json"))
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["model.embed.weight"] == {
        "name": "model.embed.weight",
        "shape": [7, 4],
        "dtype": "float32",
        "cut": "sharded on dim 0",
        "local": [4, 4],
        "bytes": 112,
        "padded": True,
    }
    assert rows["model.gate_up.weight"]["cut"] == "sharded on dim 0 in 2 blocks"
    assert rows["model.norm.weight"]["cut"] == "same on all ranks"
    assert found["bytes"] == sum(row["bytes"] for row in found["rows"])


def test_names_stay_whole_in_a_pipe_and_copies_are_told(tmp_path: Path) -> None:
    name = "a_module_with_quite_a_long_name." * 4 + "weight"
    heads = [tpcore.Block(4, 2, replicate=True)]
    keys = partial(tpcore.ColumnParallelLinear, 4, 4, bias=False, blocks=heads, gather_output=False)
    saved(tmp_path / "c", 4, lambda ctx: {"model": {name: keys().state_dict()["weight"]}})
    (line,) = [line for line in run("inspect", tmp_path / "c").splitlines() if f"model.{name} " in line]
    assert "sharded on dim 0, held by 2 ranks each" in line
    assert "2x4" in line


def test_resharding_warns_of_sizes_that_no_plain_layer_fits(tmp_path: Path) -> None:
    write(tmp_path / "c", 2)
    said = run("reshard", tmp_path / "c", tmp_path / "three", "--tp", 3)
    assert re.search(r"warning: tp=3 does not divide model\.gate_up\.\w+, .*: only layers with pad=True", said)
    assert "embed" not in said  # padded at tp=2 already
    assert "warning" not in run("reshard", tmp_path / "c", tmp_path / "four", "--tp", 4)
    save_file({"w": torch.ones(8, 4)}, tmp_path / "w.safetensors")
    said = run("reshard", tmp_path / "w.safetensors", tmp_path / "cut", "--tp", 3, "--cut", "w=0")
    assert "warning: tp=3 does not divide model.w: only" in said  # the rules are those of the source


@pytest.mark.parametrize("tp", [97, 10**6, 10**20])
def test_more_ranks_than_a_sharded_tensor_has_entries_are_refused(tmp_path: Path, tp: int) -> None:
    save_file({"w": torch.ones(96, 4), "step": torch.ones(())}, tmp_path / "w.safetensors")
    run("reshard", tmp_path / "w.safetensors", tmp_path / "cut", "--tp", 96, "--cut", "w=0")
    said = run("reshard", tmp_path / "cut", tmp_path / "out", "--tp", tp, status=2)
    assert f"tp={tp} is too many ranks for {tmp_path / 'cut'}: give 96 or less: the longest dim that is sharded" in said
    said = run("reshard", tmp_path / "w.safetensors", tmp_path / "out", "--tp", max(tp, 4097), status=2)
    assert "give 4096 or less" in said  # of copies: nothing is sharded
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dims", [65, 20_000])
def test_more_dims_than_a_tensor_of_torch_has_are_damage(tmp_path: Path, dims: int) -> None:
    file, pickled, out = tmp_path / "w.safetensors", tmp_path / "w.pt", tmp_path / "out"
    header = json.dumps({"w": {"dtype": "F32", "shape": [1] * dims, "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    torch.save({"w": torch.zeros((1,) * 65)}, pickled)
    for path, n in ((file, dims), (pickled, 65)):
        for words in (["consolidate", path, out], ["reshard", path, out, "--tp", 1], ["inspect", path]):
            said = run(*words, status=2)
            assert f"'w' has {n} dims, and a tensor of torch 64 at most: it is damaged" in said
    assert not out.exists()


def test_differences_are_found_beside_equal_bits(tmp_path: Path) -> None:
    """Of which no difference is taken: there the same NaN is no difference, and so it is between other bits."""
    nan, zeros = torch.tensor([float("nan"), 0.0]), torch.tensor([0.0, -0.0])
    save_file({"nan": nan, "zero": zeros, "w": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"nan": -nan, "zero": -zeros, "w": torch.tensor([1.0, 3.0])}, tmp_path / "b.safetensors")
    (row,) = json.loads(run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json", status=1))
    assert (row["name"], row["absolute"]) == ("w", 2.0)


def test_more_files_than_a_process_may_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of which is read through a descriptor of its own, and not if another file has taken its place."""
    whole = {"w": torch.arange(96.0).view(48, 2), "b": torch.ones(4)}
    save_file(whole, tmp_path / "w.safetensors")
    run("reshard", tmp_path / "w.safetensors", tmp_path / "c", "--tp", 48, "--cut", "w=0")
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    with opened(tmp_path / "c", Reading()) as source:
        unsharded(tensors_of(source)["w"])
        assert len(os.listdir("/proc/self/fd")) == before + 48
    monkeypatch.setattr(resource, "getrlimit", lambda _: (before * 2 + 20, -1))
    with opened(tmp_path / "c", Reading()) as source:
        tensors = tensors_of(source)
        assert torch.equal(unsharded(tensors["w"]), whole["w"])
        assert len(os.listdir("/proc/self/fd")) < before + 24
        last = tmp_path / "c" / "tp_rank_47" / "model.safetensors"
        save_file({"w": torch.ones(1, 2)}, tmp_path / "other")
        os.replace(tmp_path / "other", last)
        with pytest.raises(CheckpointError, match=r"tp_rank_47.*was replaced or written to while it was read"):
            unsharded(tensors["w"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pickle_that_is_not_trusted_is_not_to_be_converted_by_the_same_command(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    said = run("convert", tmp_path / "w.pt", tmp_path / "w.safetensors", "--no-trust", status=2)
    assert "(--no-trust) does not read: where it is trusted" in said


def test_diff(tmp_path: Path) -> None:
    write(tmp_path / "a", 2)
    write(tmp_path / "b", 4, bias=0.5)
    found = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json", status=1))
    assert found == [{"name": "norm.bias", "why": None, "absolute": 0.5, "relative": 1.0}]
    torch.save({"norm.bias": torch.zeros(3), "more": torch.zeros(1)}, tmp_path / "x.pt")
    said = run("diff", tmp_path / "a", tmp_path / "x.pt", status=1)
    assert "only in" in said
    assert "shape" in said


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_diff_of_integers_that_float64_does_not_tell_apart(tmp_path: Path, dtype: torch.dtype) -> None:
    for name, value in (("a", 2**53), ("b", 2**53 + 1)):
        save_file({"step": torch.tensor([7, value], dtype=dtype)}, tmp_path / f"{name}.safetensors")
    (found,) = json.loads(run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json", status=1))
    assert (found["name"], found["absolute"]) == ("step", 1.0)
    assert "the same" in run("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors")


def test_names_in_files_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    """Sequences that a terminal obeys are printed escaped, by every command that prints a name."""
    name = "w\x1b[2J\x9b31m\r\u202eb\nforged"
    save_file({name: torch.ones(4)}, tmp_path / "a.safetensors")
    save_file({name: torch.zeros(4)}, tmp_path / "b.safetensors")
    torch.save({name: torch.ones(2)}, tmp_path / "w.pt")
    out = tmp_path / "c"
    said = [
        run("inspect", tmp_path / "a.safetensors"),
        run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", status=1),
        run("reshard", tmp_path / "a.safetensors", out, "--tp", 3, "--cut", "w=0"),
        run("verify", tmp_path / "none\x1b[2J", status=2),
    ]
    assert r"w\x1b[2J\x9b31m\r\u202eb\nforged" in said[0]
    for text in said:
        assert not set(text) & set("\x1b\x9b\r\u202e"), text


def test_verify_finds_all(tmp_path: Path) -> None:
    write(tmp_path / "c", 2)
    file = tmp_path / "c" / "tp_rank_1" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 4  # of the first tensor
    file.write_bytes(data)
    (tmp_path / "c" / "tp_rank_0" / "stray").write_text("")
    (tmp_path / "c" / "tp_rank_0" / "optimizer.safetensors").unlink()
    said = json.loads(run("verify", tmp_path / "c", "--json", status=1))["problems"]
    for words in ("stray is not listed", "cannot open", "another crc32", "is damaged: its crc32"):
        assert any(words in line for line in said), (words, said)
    run("consolidate", tmp_path / "c", tmp_path / "out", status=2)
    assert os.listdir(tmp_path) == ["c"]


def test_without_a_manifest(tmp_path: Path) -> None:
    write(tmp_path / "c", 2)
    (tmp_path / "c" / "manifest.json").unlink()
    for command in (("verify", tmp_path / "c"), ("consolidate", tmp_path / "c", tmp_path / "out")):
        said = run(*command, status=1 if command[0] == "verify" else 2)
        assert "c is no checkpoint: " in said
        assert "manifest.json is missing" in said


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "c", 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    run("consolidate", tmp_path / "c", tmp_path / "out")  # beside what else is there
    for name, *options in (("consolidate",), ("reshard", "--tp", 1)):
        said = run(name, tmp_path / "c", tmp_path / "w.safetensors", *options, status=2).replace("\n", "")
        assert "w.safetensors is the name of a file, and a folder is written: give" in said
    before = (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns
    run("consolidate", tmp_path / "c", tmp_path / "out", status=2)
    run("reshard", tmp_path / "c", tmp_path / "out", "--tp", 1, status=2)
    write(tmp_path / "precious", 2)
    manifest = (tmp_path / "precious" / "manifest.json").read_bytes()
    (tmp_path / "other" / "tp_rank_0").mkdir(parents=True)
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "other" / "tp_rank_0" / "checkpoint.pt")
    for name, source, *options in (("reshard", "c", "--tp", 1), ("convert", "other")):
        said = run(name, tmp_path / source, tmp_path / "precious", *options, status=2).replace("\n", "")
        assert f"{tmp_path / 'precious'} is there already: give another name" in said
    assert (tmp_path / "precious" / "manifest.json").read_bytes() == manifest
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before
    held = sorted(os.listdir(tmp_path / "c"))
    assert "c is a checkpoint: give another" in run("consolidate", tmp_path / "c", tmp_path / "c", status=2)
    assert sorted(os.listdir(tmp_path / "c")) == held
    assert sorted(os.listdir(tmp_path)) == ["c", "other", "out", "precious"]


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("consolidate", "a", "out"), {"out", "files"}),
        (("reshard", "a", "out", "--tp", 3), {"out", "tp", "left_out"}),
        (("convert", "w.pt", "out"), {"out", "files"}),
        (("inspect", "a"), {"path", "form", "tp", "pp", "rows", "bytes"}),
        (("diff", "a", "b"), set()),
        (("verify", "a"), {"path", "problems", "without_checksums"}),
    ],
)
def test_json_and_progress(
    words: tuple[Any, ...], keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every command: JSON and nothing else, or a bar on a terminal that gets to its end."""
    monkeypatch.chdir(tmp_path)
    values = write(Path("a"), 2)
    write(Path("b"), 4)
    torch.save(values, "w.pt")
    said = json.loads(run(*words, "--json"))
    assert (set(said) if isinstance(said, dict) else set()) == keys
    told: list[tuple[int, int]] = []
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as rich sees it
    monkeypatch.setattr(Progress, "update", lambda self, task, completed, total: told.append((completed, total)))
    run(*words[:1], *(f"{w}2" if w == "out" else w for w in words[1:]))
    if words[0] == "inspect":
        assert not told  # reads no tensors
    else:
        assert told[0][0] == 0
        assert told[-1][0] == told[-1][1] > 0
