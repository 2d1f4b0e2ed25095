"""Whole jobs under Neuron's limits, on the stand-in: they equal one process, and nothing is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import hf
from helpers.pipelines import part_of
from helpers.rank_pool import RankPool
from helpers.tiers import tiers
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.layers import move_model_to_device
from tpcore_neuron import NativeBackend
from tpcore_neuron.stand_in.device import install
from tpcore_neuron.stand_in.limits import SDK

pytestmark = pytest.mark.xdist_group("native")
UNDER = {"env": {"TPCORE_NEURON_LIMITS": SDK}}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32 through two layers, sums in another order


@pytest.fixture(scope="module", name="ranks")
def ranks_on_the_stand_in() -> Iterator[RankPool]:
    with RankPool(4, backend=NativeBackend) as pool:
        yield pool


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def made(name: str, layers: int = 0) -> Any:
    torch.manual_seed(0)
    model = getattr(hf, name)(**({"num_hidden_layers": layers} if layers else {})).float()
    model.config.use_cache = False
    return model


def steps(model: nn.Module, optimizer: Any, run: Any, data: dict[str, Tensor]) -> list[float]:
    losses = []
    for _ in range(2):
        losses.append(float(run(**data)))
        tpcore.optimizer_step(optimizer, max_norm=0.5)
        optimizer.zero_grad()
    return losses


def backward(model: Any) -> Any:
    def run(**data: Tensor) -> Tensor:
        loss = model(**data).loss
        loss.backward()
        return loss.detach()

    return run


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plainly(name: str, layers: int) -> tuple[list[float], dict[str, Tensor]]:
    model = made(name, layers)
    optimizer, losses = sgd(model), []
    for _ in range(2):
        losses.append(float(backward(model)(**batch())))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def trained(ctx: ParallelContext, name: str, zero: bool, options: dict[str, Any]) -> dict[str, int]:
    """What was refused in two steps, which are those of one process."""
    device = install()
    device.limits.refused.clear()
    layers = ctx.mesh.axes.get("pp", 0)
    want, values = plainly(name, layers)
    model = tpcore.parallelize(made(name, layers), **options)
    assert move_model_to_device(model, ctx.device) is model
    kind = {"lr": 0.1, "momentum": 0.9}
    optimizer = tpcore.Zero1(torch.optim.SGD, model.parameters(), **kind) if zero else sgd(model)
    dp = ctx.mesh.axes.get("dp", 1) * ctx.mesh.axes.get("ep", 1)
    data = {k: v.chunk(dp)[ctx.index(ctx.batch)].to(ctx.device) for k, v in batch().items()}
    run = (
        tpcore.PipelineModel(model, options["num_microbatches"]).run_train if "pp" in ctx.mesh.axes else backward(model)
    )
    losses = steps(model, optimizer, run, data)
    if dp == 1:
        torch.testing.assert_close(losses, want, **CLOSE)
    for n, p in model.named_parameters():
        assert p.device.type == "neuron", n
        torch.testing.assert_close(p.detach().cpu(), part_of(values[n], p, ctx), **CLOSE)
    return dict(device.limits.refused)


JOBS: dict[str, tuple[dict[str, int], str, bool, dict[str, Any]]] = {
    "tp": ({"tp": 2}, "llama", False, {}),
    "tokens": ({"tp": 2}, "llama", False, {"sequence_parallel": True}),
    "pp": ({"pp": 2}, "llama", False, {"num_microbatches": 2}),
    "pp, tp": ({"pp": 2, "tp": 2}, "llama", False, {"num_microbatches": 2}),
    "pp 4": ({"pp": 4}, "llama", False, {"num_microbatches": 2}),
    "cp gather": ({"cp": 2}, "llama", False, {"context_parallel": "gather"}),
    "cp ulysses": ({"cp": 2}, "llama", False, {"context_parallel": "ulysses"}),
    "cp ring": ({"cp": 2}, "llama", False, {"context_parallel": "ring"}),
    "cp ulysses, tp": ({"cp": 2, "tp": 2}, "llama", False, {"context_parallel": "ulysses"}),
    "cp ring, tp": ({"cp": 2, "tp": 2}, "llama", False, {"context_parallel": "ring"}),
    "cp ulysses 4": ({"cp": 4}, "llama", False, {"context_parallel": "ulysses"}),
    "ep": ({"ep": 2, "tp": 1}, "mixtral", False, {"dispatch": "all_to_all"}),
    "ep, tp": ({"ep": 2, "tp": 2}, "mixtral", False, {"dispatch": "all_to_all"}),
    "ep 4": ({"ep": 4, "tp": 1}, "mixtral", False, {"dispatch": "all_to_all"}),
    "zero": ({"dp": 2, "tp": 2}, "llama", True, {}),
}


def adapted(ctx: ParallelContext) -> dict[str, int]:
    """LoRA: two steps of the adapters are those of one process."""
    import peft

    from tpcore_hf.peft import get_peft_model

    refused = install().limits.refused
    refused.clear()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    both = []
    for whole in (True, False):
        base = made("llama") if whole else tpcore.parallelize(made("llama"))
        torch.manual_seed(7)
        model = peft.get_peft_model(base, config) if whole else get_peft_model(base, config)
        device = torch.device("cpu") if whole else ctx.device
        move_model_to_device(model, device)
        losses, optimizer = [], torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(3):
            losses.append(float(backward(model)(**{k: v.to(device) for k, v in batch().items()})))
            optimizer.step()
            optimizer.zero_grad()
        both.append(losses)
    torch.testing.assert_close(both[1], both[0], **CLOSE)
    assert both[0][0] - both[0][2] > 1e-4  # they have learnt
    return dict(refused)


def written(ctx: ParallelContext, folder: str) -> dict[str, int]:
    refused = install().limits.refused
    refused.clear()
    model = move_model_to_device(tpcore.parallelize(made("llama")), ctx.device)
    tpcore.checkpoint.save({"model": model.state_dict()}, folder)
    return dict(refused)


def read(ctx: ParallelContext, folder: str) -> dict[str, int]:
    """On another mesh; and what it generates there."""
    refused = install().limits.refused
    refused.clear()
    dense, model = made("llama"), made("llama")
    for p in model.parameters():
        p.detach().zero_()
    model = move_model_to_device(tpcore.parallelize(model), ctx.device)
    tpcore.checkpoint.load(folder, model)
    values = dict(dense.named_parameters())
    for n, p in model.named_parameters():
        assert torch.equal(p.detach().cpu(), part_of(values[n].detach(), p, ctx)), n
    prompt = batch()["input_ids"]
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    got = model.eval().generate(prompt.to(ctx.device), attention_mask=torch.ones_like(prompt).to(ctx.device), **how)
    assert torch.equal(got.cpu(), dense.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **how))
    return dict(refused)


@pytest.mark.slow
def test_adapters_are_those_of_one_process(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), adapted, **UNDER) == [{}] * 2


@pytest.mark.slow
def test_a_checkpoint_opens_on_another_mesh_and_generates(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(Mesh({"dp": 2, "tp": 2}), written, str(tmp_path / "saved"), **UNDER) == [{}] * 4
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), read, str(tmp_path / "saved"), **UNDER) == [{}] * 2


QUICK = "cp ulysses", "ep"


@pytest.mark.parametrize("job", tiers(QUICK, slow=JOBS))
def test_a_job_is_that_of_one_process_and_nothing_is_refused(ranks: RankPool, job: str) -> None:
    axes, *rest = JOBS[job]
    mesh = Mesh({"dp": 1, **axes, "tp": axes.get("tp", 1)})
    assert ranks.run(mesh, trained, *rest, **UNDER) == [{}] * mesh.size
