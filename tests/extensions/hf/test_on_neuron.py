"""Whole jobs under Neuron's limits, on the stand-in: they equal one process, and nothing is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import composed, families, hf, states, trainers
from helpers.nets import widen_muon
from helpers.pipelines import part_of
from helpers.rank_pool import RankPool
from helpers.stand_in import CLOSE, FREE, UNDER, as_after_init, counted, ranks_on_the_stand_in  # noqa: F401  the fixture
from helpers.tiers import tiers
from test_muon_models import Whole
from test_trainer import adapted as with_adapters
from torch import Tensor, nn

import tpcore
from tpcore import Mesh, ParallelContext
from tpcore.layers import move_model_to_device
from tpcore_neuron.stand_in import compiler, private

pytestmark = pytest.mark.xdist_group("native")


HOW = {"under": UNDER, "free": FREE}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (8, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def made(name: str, layers: int = 0) -> Any:
    torch.manual_seed(0)
    if name in states.SIZES:
        model = families.made(families.class_of(name), families.config_of(name, **states.SIZES[name])).float()
    else:
        sizes = {"num_hidden_layers": layers} if layers else {}
        kernel = {"experts_implementation": None} if name == "mixtral" else {}  # transformers' default
        model = getattr(hf, name)(**sizes, **kernel).float()
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


def plainly(name: str, layers: int, by: str) -> tuple[list[float], dict[str, Tensor]]:
    model = made(name, layers)
    with pytest.MonkeyPatch.context() as patch:
        widen_muon(patch)
        optimizer: Any = Whole([*model.named_parameters()], MUON, MUON) if by.startswith("muon") else sgd(model)
        losses = []
        for _ in range(2):
            losses.append(float(backward(model)(**batch())))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.named_parameters())


MUON = {"lr": 0.01}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd": sgd,
    "zero": lambda model: tpcore.Zero1(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9),
    "muon": lambda model: tpcore.Muon(model.named_parameters(), ns_dtype=torch.float32, **MUON),
    "muon, zero": lambda model: tpcore.Zero1(tpcore.Muon, model.named_parameters(), ns_dtype=torch.float32, **MUON),
}


def trained(ctx: ParallelContext, name: str, by: str, options: dict[str, Any]) -> dict[str, int]:
    """What was refused in two steps, which are those of one process."""
    refused = counted(ctx)
    layers = sum(options.get("layers_per_stage", [ctx.mesh.axes.get("pp", 0)]))
    want, values = plainly(name, layers, by)
    model = tpcore.parallelize(made(name, layers), **options)
    assert move_model_to_device(model, ctx.device) is model
    optimizer = OPTIMIZERS[by](model)
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
    return dict(refused)


JOBS: dict[str, tuple[dict[str, int], str, str, dict[str, Any]]] = {
    "tp": ({"tp": 2}, "llama", "sgd", {}),
    "tokens": ({"tp": 2}, "llama", "sgd", {"sequence_parallel": True}),
    "pp": ({"pp": 2}, "llama", "sgd", {"num_microbatches": 2}),
    "pp, tp": ({"pp": 2, "tp": 2}, "llama", "sgd", {"num_microbatches": 2}),
    "pp 4": ({"pp": 4}, "llama", "sgd", {"num_microbatches": 2}),
    "cp gather": ({"cp": 2}, "llama", "sgd", {"context_parallel": "gather"}),
    "cp ulysses": ({"cp": 2}, "llama", "sgd", {"context_parallel": "ulysses"}),
    "cp ring": ({"cp": 2}, "llama", "sgd", {"context_parallel": "ring"}),
    "cp ulysses, tp": ({"cp": 2, "tp": 2}, "llama", "sgd", {"context_parallel": "ulysses"}),
    "cp ring, tp": ({"cp": 2, "tp": 2}, "llama", "sgd", {"context_parallel": "ring"}),
    "cp ulysses 4": ({"cp": 4}, "llama", "sgd", {"context_parallel": "ulysses"}),
    "ep": ({"ep": 2, "tp": 1}, "mixtral", "sgd", {"dispatch": "all_to_all"}),
    "ep, tp": ({"ep": 2, "tp": 2}, "mixtral", "sgd", {"dispatch": "all_to_all"}),
    "ep 4": ({"ep": 4, "tp": 1}, "mixtral", "sgd", {"dispatch": "all_to_all"}),
    "zero": ({"dp": 2, "tp": 2}, "llama", "zero", {}),
    # above the sizes whose all-to-all is refused, and with tp inside of every other axis
    "pp 4, tp": ({"pp": 4, "tp": 2}, "llama", "sgd", {"num_microbatches": 4}),
    "pp 2, tp 4": ({"pp": 2, "tp": 4}, "llama", "sgd", {"num_microbatches": 2}),
    "pp, dp, tp, zero": ({"pp": 2, "dp": 2, "tp": 2}, "llama", "zero", {"num_microbatches": 2}),
    "cp gather 4, tp": ({"cp": 4, "tp": 2}, "llama", "sgd", {"context_parallel": "gather"}),
    "cp ulysses 2, tp 2, dp, zero": ({"dp": 2, "cp": 2, "tp": 2}, "llama", "zero", {"context_parallel": "ulysses"}),
    "cp ring 4, tp": ({"cp": 4, "tp": 2}, "llama", "sgd", {"context_parallel": "ring"}),
    "cp ring 8": ({"cp": 8}, "llama", "sgd", {"context_parallel": "ring"}),
    "ep 4, tp": ({"ep": 4, "tp": 2}, "mixtral", "sgd", {"dispatch": "all_to_all"}),
    "ep 2, tp 4": ({"ep": 2, "tp": 4}, "mixtral", "sgd", {"dispatch": "all_to_all"}),
    "ep, dp, tp, zero": ({"dp": 2, "ep": 2, "tp": 2}, "mixtral", "zero", {"dispatch": "all_to_all"}),
    "zero 8": ({"dp": 8}, "llama", "zero", {}),
    "zero 4, tokens": ({"dp": 4, "tp": 2}, "llama", "zero", {"sequence_parallel": True}),
    "pp, tp, uneven": ({"pp": 2, "tp": 2}, "llama", "zero", {"num_microbatches": 2, "layers_per_stage": [1, 2]}),
    "muon, ep, tp": ({"ep": 2, "tp": 2}, "mixtral", "muon", {"dispatch": "all_to_all"}),
    "muon, zero": ({"dp": 2, "tp": 2}, "llama", "muon, zero", {}),
    "states": ({"cp": 2}, "qwen3_next", "sgd", {"context_parallel": "ring"}),
    "states, tp": ({"cp": 2, "tp": 2}, "qwen3_next", "sgd", {"context_parallel": "ulysses"}),
}


def adapted(ctx: ParallelContext) -> dict[str, int]:
    """LoRA: two steps of the adapters are those of one process."""
    import peft

    from tpcore_hf.peft import get_peft_model

    refused = counted(ctx)
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
    refused = counted(ctx)
    model = move_model_to_device(tpcore.parallelize(made("llama")), ctx.device)
    tpcore.checkpoint.save({"model": model.state_dict()}, folder)
    return dict(refused)


def read(ctx: ParallelContext, folder: str) -> dict[str, int]:
    """On another mesh; and what it generates there."""
    refused = counted(ctx)
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


class Counting(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor([count]))


def counts(ctx: ParallelContext, folder: str) -> tuple[str, dict[str, int]]:
    """Of whole numbers on the device: a small one, and the error at one that has no place there."""
    refused = counted(ctx)
    tpcore.checkpoint.save({"model": Counting(2**31 - 1).state_dict()}, f"{folder}/small")
    tpcore.checkpoint.save({"model": Counting(2**40 + 7).state_dict()}, f"{folder}/large")
    held = Counting(0)
    tpcore.checkpoint.load(f"{folder}/large", held)
    assert int(held.count) == 2**40 + 7  # on the host it has its place
    model = move_model_to_device(Counting(0), ctx.device)
    tpcore.checkpoint.load(f"{folder}/small", model)
    before = dict(refused)
    with pytest.raises(tpcore.CheckpointError) as wrong:
        tpcore.checkpoint.load(f"{folder}/large", model)
    return str(wrong.value), before


def test_numbers_that_the_device_cannot_hold_are_refused_at_loading(ranks: RankPool, tmp_path: Path) -> None:
    for error, before in ranks.run(Mesh({"dp": 1, "tp": 2}), counts, str(tmp_path), **UNDER):
        assert before == {}
        assert "count" in error
        assert "has numbers beyond 32 bits, which neuron:0 does not keep: leave the tensor on the CPU" in error


@pytest.mark.slow
def test_adapters_are_those_of_one_process(ranks: RankPool) -> None:
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), adapted, **UNDER) == [{}] * 2


def by_trainer(ctx: ParallelContext, where: Path, make: Any) -> tuple[Any, dict[str, int]]:
    refused = counted(ctx)
    history, _ = trainers.on_mesh(ctx, where, make, use_cpu=False)
    return history, dict(refused)


MADE = {"all weights": (trainers.model, {}), "adapters": tuple(partial(with_adapters, how) for how in ("", "after"))}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("what", "tp"), tiers([], slow=[(what, 2) for what in MADE], drill=[("adapters", 4)]))
def test_the_trainer_is_that_of_one_process(ranks: RankPool, tmp_path: Path, what: str, tp: int) -> None:
    """On the device, which accelerate knows by the name of AWS's package; it pins memory and empties caches."""
    plain, cut = MADE[what]
    want = trainers.history(trainers.stock(tmp_path / "stock", plain))
    mesh = Mesh({"pp": 1, "dp": 1, "tp": tp})
    for got, refused in ranks.run(mesh, as_after_init, by_trainer, tmp_path / "mesh", cut, **UNDER):
        assert refused == {}
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)  # as CLOSE


@pytest.mark.slow
def test_a_checkpoint_opens_on_another_mesh_and_generates(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(Mesh({"dp": 2, "tp": 2}), written, str(tmp_path / "saved"), **UNDER) == [{}] * 4
    assert ranks.run(Mesh({"dp": 1, "tp": 2}), read, str(tmp_path / "saved"), **UNDER) == [{}] * 2


QUICK = ("cp ulysses", "under"), ("ep", "under")
UNDER_LIMITS, ALL = ([(job, how) for how in hows for job in JOBS] for hows in (["under"], HOW))


@pytest.mark.parametrize(("job", "how"), tiers(QUICK, slow=UNDER_LIMITS, drill=ALL))
def test_a_job_is_that_of_one_process_and_nothing_is_refused(ranks: RankPool, job: str, how: str) -> None:
    axes, *rest = JOBS[job]
    mesh = Mesh({"dp": 1, **axes, "tp": axes.get("tp", 1)})
    assert ranks.run(mesh, trained, *rest, **HOW[how]) == [{}] * mesh.size


def stepped(ctx: ParallelContext, family: str, sizes: dict[str, Any], options: dict[str, Any]) -> dict[str, int]:
    """A step of a family: loss, output and every gradient are those of the whole model."""
    refused = counted(ctx)
    if family in composed.CASES:
        kind, config, data = composed.case(family)
        whole = families.made(kind, config).float()
    else:
        whole = families.made(families.class_of(family), families.config_of(family, **sizes)).float()
        data = families.batch_of(whole)
    data = {k: v.float() if v.is_floating_point() else v for k, v in data.items()}
    sharded = tpcore.parallelize(copy.deepcopy(whole), **options)
    assert move_model_to_device(sharded, ctx.device) is sharded
    want = families.step(whole, data)
    got = families.step(sharded, {k: v.to(ctx.device) for k, v in data.items()})
    far = {what: families.distance(a.cpu(), b) for what, a, b in zip(("loss", "output"), got, want, strict=True)}
    values = dict(whole.named_parameters())
    for name, p in sharded.named_parameters():
        full = values[name].grad
        assert (full is None) == (p.grad is None), name
        if p.grad is not None:
            far[name] = families.distance(p.grad.cpu(), part_of(full, p, ctx))
    # float32 through two layers, and gradients of the first are sums of many of either sign
    assert max(far.values()) < 1e-3, far
    return dict(refused)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "kv heads below tp": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "fused, kv heads below tp": ("phi3", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "latent attention": ("deepseek_v3", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "experts": ("mixtral", {"num_attention_heads": 8}),
    "shared experts": ("qwen2_moe", {"num_attention_heads": 8}),
    "tied": ("gemma2", {"num_attention_heads": 8, "tie_word_embeddings": True}),
    "tied, fused": ("gpt2", {"n_head": 8}),
    "encoder": ("bert", {"num_attention_heads": 8}),
    "encoder and decoder": ("t5", {"num_heads": 8}),
    "pictures": ("vit", {"num_attention_heads": 8}),
    "slopes": ("bloom", {"n_head": 8}),
    "pictures among tokens": ("Qwen2VLForConditionalGeneration", {}),
    "speech": ("WhisperForConditionalGeneration", {}),
}
TOKENS = "dense", "kv heads below tp", "experts", "tied"
STEPS = [(kind, 2, ()) for kind in FAMILIES] + [(kind, 4, ("sequence_parallel",)) for kind in TOKENS]


@pytest.mark.filterwarnings("ignore")  # what transformers says of tiny models
@pytest.mark.parametrize(
    ("kind", "world", "options"),
    tiers(
        [("kv heads below tp", 2, ()), ("tied", 2, ("sequence_parallel",))],
        slow=[*STEPS, ("dense", 8, ()), ("latent attention", 8, ())],
        drill=[
            (kind, world, options)
            for kind in FAMILIES
            for world in (4, 8)
            for options in ((), ("sequence_parallel",))
            if (not options or kind in TOKENS) and (world < 8 or FAMILIES[kind][1])
        ],
    ),
)
@pytest.mark.parametrize("how", tiers(["under"], drill=["free"]))
def test_a_family_is_the_whole_model_and_nothing_is_refused(
    ranks: RankPool, kind: str, world: int, options: tuple[str, ...], how: str
) -> None:
    found = ranks.run(Mesh({"dp": 1, "tp": world}), stepped, *FAMILIES[kind], dict.fromkeys(options, True), **HOW[how])
    assert found == [{}] * world


GRAPHS: dict[str, tuple[str, dict[str, int], dict[str, Any], str]] = {
    "dense": ("llama", {"tp": 2}, {}, ""),
    "tokens": ("llama", {"tp": 2}, {"sequence_parallel": True}, "reduce_scatter_tensor"),
    "features of experts": ("mixtral", {"tp": 2}, {}, ""),
    "experts": ("mixtral", {"tp": 2}, {"expert_parallel": True}, ""),
    "experts, exchanged": ("mixtral", {"ep": 4, "tp": 1}, {"dispatch": "all_to_all"}, "all_to_all_single"),
    "experts with seats": ("mixtral", {"ep": 2, "tp": 2}, {"capacity_factor": 1.0}, "reduce_scatter_tensor"),
    "experts of their own form": ("llama4_text", {"tp": 2}, {}, ""),
}
"""The family, mesh and options of each, and a collective that its graphs have, beside all-gathers and sums."""
RARER = "experts", "experts with seats"


def operators_of(ctx: ParallelContext, name: str, options: dict[str, Any]) -> tuple[list[set[str]], dict[str, int]]:
    """The operators of the graphs, forward and backward, of a whole model with its loss, whose steps equal eager ones:
    the second, with other tokens and other experts for them, takes the graphs of the first."""
    refused, found = counted(ctx), list[set[str]]()

    def record(graph: Any, inputs: Any) -> Any:
        found.append({str(node.target) for node in graph.graph.nodes if node.op == "call_function"})
        return compiler._compiled(graph, inputs)

    model = families.made(families.class_of(name), families.config_of(name, use_cache=False)).float()
    model = move_model_to_device(tpcore.parallelize(model, **options), ctx.device)
    run: Any = torch.compile(model, backend=private.aot_autograd(fw_compiler=record), fullgraph=True, dynamic=False)
    for ids in torch.randint(3, 97, (2, 2, 8), generator=torch.Generator().manual_seed(1)):
        values = []
        for called in (model, run):
            model.zero_grad()
            loss = backward(called)(input_ids=ids.to(ctx.device), labels=ids.to(ctx.device))
            values.append([loss.cpu(), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)])
        # as of a family: float32, and gradients that are sums of many of either sign
        assert max(map(families.distance, *values)) < 1e-3
    return found, dict(refused)


@pytest.mark.parametrize("kind", tiers([], slow=[k for k in GRAPHS if k not in RARER], drill=RARER))
def test_a_models_graphs_hold_operators_of_torch_alone(ranks: RankPool, kind: str) -> None:
    name, axes, options, collective = GRAPHS[kind]
    mesh = Mesh({"dp": 1, **axes})
    for found, refused in ranks.run(mesh, as_after_init, operators_of, name, options, timeout=300, **UNDER):
        assert refused == {}
        assert len(found) == 2  # one graph forward and one backward
        for operators in found:
            assert {name.partition(".")[0] for name in operators} <= {"aten", "_c10d_functional", GETITEM}
            sent = {name.split(".")[1] for name in operators if name.startswith("_c10d")}
            special = {"reduce_scatter_tensor", "all_to_all_single"} & sent
            assert special == {collective} - {""}
            assert "wait_tensor" in sent


GETITEM = "<built-in function getitem>"
