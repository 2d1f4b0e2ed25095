"""Checkpoints of tensors on XLA, which have no address: tied weights are stored once, and views apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.nets import assert_same_parameters, cut_net, plain_net
from onreplicas import on_replicas
from safetensors.torch import load_file

import tpcore
from tpcore.checkpoint import load, save
from tpcore.runtime.context import ParallelContext
from tpcore_neuron import testing as replicas


def saved(ctx: ParallelContext, folder: Path) -> None:
    """The same twice, from the device and from the CPU: a net with tied weights, and views of one tensor."""
    full = {k: v.clone() for k, v in plain_net().state_dict().items()}
    for name, device in (("xla", ctx.device), ("cpu", torch.device("cpu"))):
        net = tpcore.layers.move_model_to_device(cut_net(full), device)
        whole = torch.arange(6.0).to(device)
        views = {"whole": whole, "low": whole[:3], "high": whole[3:], "again": whole.detach()}
        save({"model": net.state_dict(), "views": views}, folder / name)


def loaded(ctx: ParallelContext, folder: Path) -> bool:
    plain = plain_net()
    zeros = {k: torch.zeros_like(v) for k, v in plain.state_dict().items()}
    net = tpcore.layers.move_model_to_device(cut_net(zeros), ctx.device)
    load(folder, model=net)
    tied = net.head.weight is net.embed.weight
    tpcore.layers.move_model_to_device(net, "cpu")
    assert_same_parameters(net, dict(plain.named_parameters()), ctx, rtol=0, atol=0)
    return tied


def written(folder: Path) -> dict[str, Any]:
    """By file: its tensors, and the state that says which of them are where."""
    tensors = {str(p.relative_to(folder)): load_file(p) for p in folder.rglob("*.safetensors")}
    states = {str(p.relative_to(folder)): json.loads(p.read_text()) for p in folder.rglob("state.json")}
    return {**tensors, **{file: [said["state"], said["tensors"]] for file, said in states.items()}}


def test_a_tied_weight_is_written_once_and_loads_tied(tmp_path):
    on_replicas(2, 2, saved, tmp_path)
    here, there = written(tmp_path / "xla"), written(tmp_path / "cpu")
    assert here.keys() == there.keys()
    for file in here:
        if file.endswith(".json"):
            assert here[file] == there[file]
        else:
            torch.testing.assert_close(here[file], there[file], rtol=0, atol=0)
    assert "embed.weight" in here["tp_rank_1/model.safetensors"]
    assert "head.weight" not in here["tp_rank_1/model.safetensors"]
    assert here["tp_rank_0/views.safetensors"].keys() == {"whole", "low", "high"}
    for tp in (2, 1):  # the other degree: two data parallel ranks that hold all of it
        assert on_replicas(2, tp, loaded, tmp_path / "xla") == [True, True]


def left_to_end(ctx: ParallelContext, folder: Path) -> None:
    save({"model": {"w": torch.ones(3).to(ctx.device)}}, folder, background=True)


def test_a_save_in_the_background_is_finished_when_the_replicas_end(tmp_path):
    on_replicas(2, 2, left_to_end, tmp_path / "c")
    ended = replicas._processes[2]
    replicas.close()
    assert ended._process.returncode == 0  # by itself: it was not killed
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
