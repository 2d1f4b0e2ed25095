"""Models of experts: training, checkpoints of both ways of sharding, files of transformers, losses of routers."""

from __future__ import annotations

from functools import cache
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import families, hf
from helpers.hf import TINY, assert_equals_whole, mixtral
from helpers.pipelines import assert_same_gradients
from helpers.tiers import tiers
from torch import Tensor

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.testing import run_ranks

SIZES = {**TINY, "num_key_value_heads": 4, "experts_implementation": "eager"}
ROUNDS = 1e-6  # norms and routers of transformers compute in float32, whose step is 1e-7
FEATURES: dict[str, Any] = {}
WHOLE = {"expert_parallel": True}
EXCHANGED: dict[str, Any] = {"dispatch": "all_to_all"}
WAYS = pytest.mark.parametrize("options", [FEATURES, WHOLE], ids=["features", "experts"])


def qwen(**options: Any) -> Any:
    sizes = {**SIZES, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **options))


def shared(**options: Any) -> Any:
    """With a layer without experts, and a shared expert beside the others, sharded by features."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    sizes = {**SIZES, "head_dim": 8, "moe_intermediate_size": 32, **experts, "n_group": 1, "topk_group": 1, **options}
    return transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**sizes))


MAKES = {"mixtral": mixtral, "qwen3_moe": qwen, "glm4_moe": shared}


SHARDED = product(["mixtral"], (8, 7))  # numbers of tokens: those of sequences of 7 stay whole


@WAYS
@pytest.mark.parametrize(
    ("name", "length"), tiers([*product(MAKES, [None]), *SHARDED], slow=[("glm4_moe", 8), ("glm4_moe", 7)])
)
def test_the_loss_of_routers_is_that_of_all_tokens(name: str, length: int | None, options: dict[str, Any]) -> None:
    """On the whole batch, and where tokens are sharded."""
    options = options if length is None else {**options, "sequence_parallel": True}
    make, batch = MAKES[name], hf.text(length=length or 8)
    assert_equals_whole(lambda: make(output_router_logits=True), (2,), batch, tolerance=ROUNDS, **options)


BY_STAGES = {
    "tp 2": ({"pp": 2, "dp": 1, "tp": 2}, FEATURES),
    "tp 2, experts": ({"pp": 2, "dp": 1, "tp": 2}, WHOLE),
    "ep 2, gathered": ({"pp": 2, "dp": 1, "ep": 2, "tp": 1}, {"dispatch": "gathered"}),
    "ep 2, all_to_all": ({"pp": 2, "dp": 1, "ep": 2, "tp": 1}, EXCHANGED),
}


@pytest.mark.parametrize("mesh", BY_STAGES)
def test_stages(mesh: str) -> None:
    axes, options = BY_STAGES[mesh]
    batch = {name: torch.cat([t[:2], t[:2]]) for name, t in hf.text(length=6).items()}  # as many labels in each half
    assert_equals_whole(mixtral, (axes,), batch, tolerance=ROUNDS, num_microbatches=2, **options)


@pytest.mark.parametrize(
    ("axes", "options", "words"),
    [
        ({"dp": 1, "ep": 3, "tp": 1}, FEATURES, r"ep=3 does not divide the 4 experts of .*layers.*mlp.experts"),
        ({"tp": 3}, WHOLE, r"mlp.experts has 4 experts; .*Degrees that fit: 1, 2$"),
    ],
)
def test_experts_that_do_not_divide(axes: dict[str, int], options: dict[str, Any], words: str) -> None:
    hf.refused(words, lambda: mixtral(num_attention_heads=6), axes, **options)


def test_ranks_without_a_chosen_expert_have_gradients_of_zeros() -> None:
    """An optimizer leaves out what has no gradient: its weights would not decay as in one process."""
    whole, token = hf.double(mixtral), torch.tensor([[7]])
    whole(input_ids=token).logits.square().mean().backward()

    def rank(ctx: tpcore.ParallelContext) -> int:
        model: Any = tpcore.parallelize(hf.double(mixtral), expert_parallel=True)
        model(input_ids=token).logits.square().mean().backward()
        assert_same_gradients(model, whole, ctx, ROUNDS, ROUNDS)
        return sum(not p.grad.any() for n, p in model.named_parameters() if ".experts." in n)

    assert sum(run_ranks(Mesh({"tp": 4}), rank)) > 0  # one token chooses two of four experts


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
@pytest.mark.parametrize("dispatch", ["gathered", "all_to_all"])
def test_ranks_of_ep_end_their_texts_by_themselves(dispatch: str, options: dict[str, Any]) -> None:
    """Each has prompts of its own, and computes its experts for the others until they are done."""
    prompts = hf.text()["input_ids"][:2, :4]

    def tokens(model: Any, row: int, eos: int | None) -> list[int]:
        ids, mask = prompts[row, None], torch.ones(1, 4, dtype=torch.int64)
        ends: dict[str, Any] = {"eos_token_id": eos, "pad_token_id": 0, "do_sample": False, "max_new_tokens": 6}
        found: list[int] = model.eval().generate(ids, attention_mask=mask, **ends, **options)[0].tolist()
        return found

    def make() -> Any:
        torch.manual_seed(0)
        return mixtral()

    unended = tokens(make(), 0, None)
    eos = unended[5]
    expected = [tokens(make(), row, eos) for row in range(2)]
    assert len(expected[0]) < len(expected[1]) == len(unended)

    def rank(ctx: tpcore.ParallelContext) -> list[int]:
        return tokens(tpcore.parallelize(make(), dispatch=dispatch), ctx.coord("ep"), eos)

    assert run_ranks(Mesh({"dp": 1, "ep": 2, "tp": 1}), rank) == expected


@pytest.mark.parametrize("how", ["grouped_mm", "batched_mm"])
def test_arguments_come_to_transformers_implementations_by_place(how: str) -> None:
    """GPT-OSS calls them by other names than the implementations that its configuration takes by default."""
    config = families.config_of("gpt_oss")
    config._experts_implementation = how

    def made() -> Any:
        return families.made(transformers.GptOssForCausalLM, config).float()

    whole, batch = made(), hf.text()
    want = whole(**batch).loss
    want.backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(made())
        loss = model(**batch).loss
        loss.backward()
        torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)  # float32, which grouped_mm takes
        assert_same_gradients(model, whole, ctx, 1e-3, 1e-5)

    run_ranks(Mesh({"tp": 2}), rank)


def batches(dp: int) -> list[list[dict[str, Tensor]]]:
    """[step][dp rank]: of one length, so that the mean over dp is the whole batch's."""
    made = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 99, (20, dp, 2, 8), generator=made)
    return [[{"input_ids": one, "labels": one} for one in step] for step in ids]


DP_TP, EP_TP = {"dp": 2, "tp": 2}, {"dp": 1, "ep": 2, "tp": 2}
MESHES = {
    "dp 2 x tp 2": (DP_TP, FEATURES),
    "dp 2 x tp 2, experts": (DP_TP, WHOLE),
    "ep 2 x tp 2": (EP_TP, FEATURES),
    "ep 2 x tp 2, experts": (EP_TP, WHOLE),
    "dp 2 x ep 2": ({"dp": 2, "ep": 2, "tp": 1}, FEATURES),
    "ep 4": ({"dp": 1, "ep": 4, "tp": 1}, FEATURES),
    "pp 2 x ep 2": ({"pp": 2, "dp": 1, "ep": 2, "tp": 1}, {"num_microbatches": 2}),
    "ep 4, all_to_all": ({"dp": 1, "ep": 4, "tp": 1}, EXCHANGED),
    "ep 2 x tp 2, experts, all_to_all": (EP_TP, {**WHOLE, **EXCHANGED}),
}


def optimizer_of(model: Any, zero1: bool) -> Any:
    make: Any = tpcore.Zero1 if zero1 else lambda kind, named, **o: kind(named, **o)
    return make(torch.optim.AdamW, model.named_parameters(), lr=1e-3)


@cache
def of_the_whole(examples: int) -> list[float]:
    whole: Any = hf.double(mixtral)
    return hf.plain_steps(whole, optimizer_of(whole, zero1=False), batches(examples))


ONCE, OTHERS = (zip(cycle([True, False]), [*MESHES][i::2], strict=False) for i in range(2))
"""Each pair of axes and one exchange; and the other meshes."""


@pytest.mark.parametrize(("zero1", "mesh"), tiers(ONCE, slow=OTHERS))
def test_twenty_clipped_steps(zero1: bool, mesh: str) -> None:
    """Losses and the norms of all gradients; AdamW itself would not see a gradient of another scale."""
    axes, options = MESHES[mesh]
    examples = axes["dp"] * axes.get("ep", 1)
    want = of_the_whole(examples)

    def rank(ctx: tpcore.ParallelContext) -> list[float]:
        model: Any = tpcore.parallelize(hf.double(mixtral), **options)
        return hf.parallel_steps(ctx, model, optimizer_of(model, zero1), batches(examples))

    for found in run_ranks(Mesh(axes), rank):
        # Adam divides by the root of small squares, which grows the float32 rounding of norms and routers
        assert found == pytest.approx(want, rel=1e-5)
    assert any(a != b for a, b in pairwise(want[::2]))


SAVED = {name: MESHES[name] for name in ("dp 2 x ep 2", "ep 2 x tp 2", "ep 2 x tp 2, experts", "ep 4", "pp 2 x ep 2")}
SAVED |= {"one process": ({"tp": 1}, FEATURES), "tp 2": ({"tp": 2}, FEATURES), "tp 4, experts": ({"tp": 4}, WHOLE)}


@pytest.mark.parametrize("saved", tiers(["pp 2 x ep 2"], slow=SAVED))
def test_a_checkpoint_opens_however_experts_are_sharded(saved: str, tmp_path: Path) -> None:
    """With an optimizer, which steps once more after it: as where the job went on. And by ``from_pretrained``."""
    batch, path = batches(1)[0][0], tmp_path / "made"

    def stepped(model: Any, optimizer: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=0.5)
        return {key: t.clone() for key, t in tpcore_hf.full_state_dict(model).items()}

    def states(options: dict[str, Any], zero1: bool, loads: bool) -> tuple[dict[str, Tensor], ...]:
        """Before and after the second step."""
        model: Any = tpcore.parallelize(hf.double(mixtral), **options)
        optimizer = optimizer_of(model, zero1)
        if loads:
            tpcore.checkpoint.load(path, model, optimizer=optimizer)
        else:
            stepped(model, optimizer)
            tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, path)
        before = {key: t.clone() for key, t in tpcore_hf.full_state_dict(model).items()}
        return before, stepped(model, optimizer)

    at, (axes, options) = list(SAVED).index(saved), SAVED[saved]
    zero1 = at % 2 == 0
    of_stages = run_ranks(Mesh(axes), lambda ctx: states(options, zero1, False))
    before, after = ({key: t for rank in of_stages for key, t in rank[i].items()} for i in range(2))
    # what is stored is whole tensors, whoever wrote them: one opens on all, each other on two
    others = range(len(SAVED)) if saved == "pp 2 x ep 2" else (at + 1, at + 3)
    for new, how in (list(SAVED.values())[i % len(SAVED)] for i in others):
        ranks = run_ranks(Mesh(new), lambda ctx, how=how: states(how, not zero1, True))
        assert {key for loaded, _ in ranks for key in loaded} == before.keys()
        for loaded, later in ranks:
            assert all(torch.equal(t, before[key]) for key, t in loaded.items())
            for key, t in later.items():
                torch.testing.assert_close(t, after[key], rtol=ROUNDS, atol=ROUNDS, msg=key)
    whole = mixtral()
    whole.save_pretrained(tmp_path / "config")
    hf.consolidate(path, tmp_path / "files", tmp_path / "config")
    opened = type(whole).from_pretrained(tmp_path / "files", dtype=torch.float64).state_dict()
    assert opened.keys() == before.keys()
    assert all(torch.equal(t, before[key]) for key, t in opened.items())


@pytest.mark.parametrize("options", [FEATURES, WHOLE, {**WHOLE, "sequence_parallel": True}])
def test_the_load_of_experts_is_that_of_all_data_ranks(options: dict[str, Any]) -> None:
    whole, (step,) = hf.double(mixtral), batches(2)[:1]
    ids = torch.cat([one["input_ids"] for one in step])
    logits = whole(ids, output_router_logits=True).router_logits
    want = [torch.bincount(one.topk(2).indices.flatten(), minlength=4).double() for one in logits]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = hf.double(mixtral)
        if ctx.comm("tp").size > 1:
            tpcore.parallelize(model, **options)
        load = tpcore_hf.ExpertLoad(model)
        for _ in range(2):
            model(**step[ctx.coord("dp")])
        found = load.read()
        assert list(found) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
        for (share, entropy, dropped), counts in zip(found.values(), want, strict=True):
            torch.testing.assert_close(share, counts / counts.sum())
            assert dropped == 0
            assert entropy == pytest.approx(
                float(torch.distributions.Categorical(share).entropy() / torch.tensor(4).log())
            )
        assert load.read() == {}
        load.close()
        model(**step[ctx.coord("dp")])
        assert load.read() == {}

    for tp in (1, 2):
        run_ranks(Mesh({"dp": 2, "tp": tp}), rank)


@pytest.mark.parametrize(
    ("axes", "engine"), [({"pp": 2, "dp": 2, "tp": 1}, False), ({"pp": 2, "dp": 1, "tp": 1}, True)], ids=str
)
def test_the_load_of_stages_is_that_of_each_microbatch_once(axes: dict[str, int], engine: bool) -> None:
    """Not of the bubble, not of what backward computes again, and read where one data rank alone had a forward."""
    (step,) = batches(2)[:1]
    batch = {name: torch.cat([one[name] for one in step]) for name in step[0]}
    logits = hf.double(mixtral)(**batch, output_router_logits=True).router_logits
    want = [torch.bincount(one.topk(2).indices.flatten(), minlength=4).double() for one in logits]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(hf.double(mixtral).train(), num_microbatches=2)
        run = tpcore.PipelineModel(model, 2).run_train if engine else lambda **b: model(**b).loss.backward()
        load = tpcore_hf.ExpertLoad(model)
        if ctx.coord("dp") == 0:
            run(**batch)
        if not engine and ctx.coord("dp") == 0:
            run(**{name: t[:2] for name, t in batch.items()})
            with torch.no_grad():
                model(**{name: t[2:] for name, t in batch.items()})  # counts as much as what is recomputed
        (found,) = load.read().values()
        counts = want[ctx.coord("pp")]
        torch.testing.assert_close(found.share, counts / counts.sum())

    run_ranks(Mesh(axes), rank)


def test_a_model_without_experts_has_no_load() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer of experts"):
        run_ranks(Mesh({"tp": 1}), lambda ctx: tpcore_hf.ExpertLoad(hf.llama()))


def test_recomputed_layers_of_experts_have_the_same_tokens() -> None:
    assert_equals_whole(mixtral, (2,), run=hf.recomputed, tolerance=ROUNDS, sequence_parallel=True, **WHOLE)
