"""The native backend under Neuron's limits, on the stand-in: whole jobs equal one process, and nothing is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import hf
from helpers.pipelines import part_of
from helpers.rank_pool import RankPool
from helpers.tiers import tiers
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.comm.comm import Comm
from tpcore.layers import move_model_to_device
from tpcore.testing import matrix
from tpcore.testing.kit import collectives
from tpcore_neuron import NativeBackend
from tpcore_neuron.settings import LIMITS
from tpcore_neuron.stand_in.device import install
from tpcore_neuron.stand_in.group import register
from tpcore_neuron.stand_in.limits import SDK, TABLE, Refusals

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


def every_call(ctx: ParallelContext) -> tuple[list[str], dict[str, int]]:
    """The kit's checks of the primitives."""
    refused = install().limits.refused
    refused.clear()
    wrong: list[str] = []
    for primitive in collectives.PRIMITIVES:
        wrong += collectives.groups(ctx, primitive)
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            wrong += collectives.right_values(ctx, primitive, dtype)
    return wrong + collectives.overlapped(ctx), dict(refused)


SOME = [c for layer in matrix.AXES for dtype in ("fp32", "bf16") for c in matrix.cases(layer, dtype)[::29]]


def layers(ctx: ParallelContext) -> tuple[list[str], dict[str, int]]:
    refused = install().limits.refused
    refused.clear()
    return matrix.run(ctx, SOME), dict(refused)


@pytest.mark.parametrize("axes", tiers([{"dp": 2, "tp": 2}], slow=[{"dp": 1, "tp": 4}]), ids=str)
def test_primitives_are_right_and_none_is_refused(ranks: RankPool, axes: dict[str, int]) -> None:
    mesh = Mesh(axes)
    assert ranks.run(mesh, every_call, **UNDER) == [([], {})] * mesh.size


@pytest.mark.slow
def test_layers(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 2, "tp": 2}), layers, **UNDER) == [([], {})] * 4


def ended(comm: Comm, call: str, device: torch.device) -> str:
    """Whether signs of zeros arrive, or the error."""
    try:
        return str(bool(torch.signbit(CALLS[call](comm, torch.full((2, 2), -0.0).to(device)).cpu()).all()))
    except (NotImplementedError, RuntimeError) as e:
        return str(e)


def with_and_without(ctx: ParallelContext) -> dict[str, tuple[str, str]]:
    """What primitives end in, also over a backend that says it can do what Neuron cannot."""
    found, backend, group = {}, ctx.backend, ctx.comm("tp").group
    can = backend.capabilities
    for call, (mend, _) in MENDS.items():
        usual = ended(ctx.comm("tp"), call, ctx.device)
        backend.capabilities = replace(can, **mend)  # type: ignore[misc]
        found[call] = usual, ended(backend.comm(group, ctx.rank), call, ctx.device)
    return found


CALLS: dict[str, Any] = {
    "permute": lambda comm, x: comm.permute(x, (1, 0)),
    "all_to_all": lambda comm, x: comm.all_to_all(x, 0, 0),
    "broadcast": lambda comm, x: comm.broadcast(x, 1),
}
MENDS: dict[str, tuple[dict[str, Any], str]] = {
    "permute": ({"unequal_parts": True}, "refuses all-to-all of parts of unequal sizes: sizes [0, 4, 0, 4]"),
    "all_to_all": ({"exchange_sizes": None}, "refuses all-to-all over other sizes than 4, 8, 16 or 32n: 2 ranks"),
    "broadcast": ({"broadcasts": True}, "False"),
}


def test_each_capability_stands_between_a_call_and_its_limit(ranks: RankPool) -> None:
    for call, (usual, unmended) in ranks.run(Mesh({"dp": 1, "tp": 2}), with_and_without, **UNDER)[0].items():
        assert usual == "True"
        assert MENDS[call][1] in unmended, call


def test_the_backend_asks_for_an_all_to_all_where_the_table_allows_it() -> None:
    table = Refusals(limit.name for limit in TABLE)
    for size, first, step in itertools.product((2, 3, 4, 8, 12, 16, 32, 48, 64), (0, 2, 4, 8, 64), (1, 2)):
        members = range(first, first + size * step, step)
        asked = NativeBackend.capabilities.exchanges(members)
        try:
            table.exchange(members, [])
            allowed = True
        except RuntimeError:
            allowed = False
        assert asked == allowed, list(members)


QUICK = "cp ulysses", "ep"


@pytest.mark.parametrize("job", tiers(QUICK, slow=JOBS))
def test_a_job_is_that_of_one_process_and_nothing_is_refused(ranks: RankPool, job: str) -> None:
    axes, *rest = JOBS[job]
    mesh = Mesh({"dp": 1, **axes, "tp": axes.get("tp", 1)})
    assert ranks.run(mesh, trained, *rest, **UNDER) == [{}] * mesh.size


def exchanged(ctx: ParallelContext, ranks: Any, sizes: list[int]) -> Tensor:
    pair = dist.new_group(ranks)
    x = torch.ones(4, device=ctx.device)
    if ctx.rank in ranks:
        dist.all_to_all_single(x, x.clone(), sizes or None, sizes or None, group=pair)
    return x


def barred(ctx: ParallelContext) -> None:
    some = dist.new_group([0, 1])
    if ctx.rank < 2:
        dist.barrier(some)


def passed_on(ctx: ParallelContext) -> None:
    x = torch.ones(2, device=ctx.device)
    dist.send(x, ctx.rank + 1) if ctx.rank % 2 == 0 else dist.recv(x, ctx.rank - 1)


def broadcast(ctx: ParallelContext) -> bool:
    x = torch.full((1,), -0.0, device=ctx.device)
    dist.broadcast(x, 0)
    return bool(torch.signbit(x.cpu()))


DIRECT: dict[str, Any] = {
    "unequal_parts": lambda ctx: exchanged(ctx, range(4), [0, 2, 0, 2] if ctx.rank % 2 else [2, 0, 2, 0]),
    "group_sizes": lambda ctx: exchanged(ctx, [0, 1], []),
    "empty": lambda ctx: dist.all_reduce(torch.empty(0, device=ctx.device)),
    "barrier": barred,
    "other_device": lambda ctx: dist.all_reduce(torch.ones(1)),
    "other_index": lambda ctx: torch.ones(1, device="neuron:7"),
    "send_recv": passed_on,
    "signed_zeros": broadcast,
    "float64": lambda ctx: (torch.ones(1, dtype=torch.float64, device=ctx.device) / 3).item() == 1 / 3,
    "int64": lambda ctx: torch.tensor([2**31], device=ctx.device).item() == 2**31,
}


def directly(names: list[str]) -> dict[str, str]:
    """What calls of torch itself end in."""
    ctx = tpcore.init(backend="neuron", tp=1)
    found = {}
    for name in names:
        try:
            found[name] = repr(DIRECT[name](ctx) is False)
        except (NotImplementedError, RuntimeError, ValueError) as e:
            found[name] = f"{type(e).__name__}: {e}"
    refused = install().limits.refused
    assert all(refused[name] == found[name].count("refuses") for name in names)
    tpcore.shutdown()
    return found


@pytest.mark.slow
def test_the_stand_in_refuses_and_narrows_what_its_table_says() -> None:
    """And with the limits off it does all of it but what gloo itself cannot: tensors of another device."""
    found = tpcore.launch(directly, 4, args=([*DIRECT],), **UNDER)[0]
    of_table = {limit.name: limit for limit in TABLE}
    for name, ended in found.items():
        limit = of_table[name]
        said = "True" if limit.error is None else f"{limit.error.__name__}: Neuron (stand-in) refuses {limit.what}"
        assert ended.startswith(said), name
    # the first rank of a group of four, and an early device, need eight ranks and a process of their own
    assert set(of_table) - set(found) == {"first_rank", "spread_groups", "early_device"}
    free = [name for name in DIRECT if name not in ("unequal_parts", "empty")]
    assert set(tpcore.launch(directly, 4, args=(free,), env={"TPCORE_NEURON_LIMITS": "none"})[0].values()) == {"False"}


def early() -> str:
    register(frozenset({"early_device"}))
    torch.ones(1, device="neuron")
    with pytest.raises(tpcore.BackendError) as refused:
        tpcore.init(backend="neuron")
    return str(refused.value)


@pytest.mark.slow
def test_a_device_used_too_early_is_told_with_the_remedy() -> None:
    assert "before anything is moved to the device" in tpcore.launch(early, 1, env={"TPCORE_NEURON_LIMITS": "2.33"})[0]


@pytest.mark.parametrize("value", ["1.0,x", "sometimes", "2.x"])
def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("TPCORE_NEURON_LIMITS", value)
    with pytest.raises(ValueError, match=r"TPCORE_NEURON_LIMITS must be an SDK such as 2.33, names of limits or none"):
        LIMITS.get()
