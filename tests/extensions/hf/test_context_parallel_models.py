"""Models of transformers whose tokens are dealt to ranks: loss and every gradient are those of the whole model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import families, hf
from helpers.hf import GPT2, NO_DROPOUT, TINY, assert_equals_whole, llama
from helpers.pipelines import assert_same_gradients, part_of
from helpers.states import SIZES
from helpers.tiers import tiers
from helpers.worlds import each_rank
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.layers.tokens import TokenOrder
from tpcore.runtime.context import use
from tpcore.testing import run_ranks
from tpcore_explain.checked import raising
from tpcore_hf.sequence.context_parallel import FAMILIES

EXACT = 1e-12  # float64, in which the order of sums is all that differs
CP2, CP4, CP2_TP2 = ({"dp": 1, "cp": 2, "tp": 1}, {"dp": 1, "cp": 4, "tp": 1}, {"dp": 1, "cp": 2, "tp": 2})
QWEN3 = {**TINY, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes norms, rotary positions and losses in float32, whatever a model's dtype is."""
    for make in (*MODELS.values(), routed):
        make()  # imports its module
    families.widen(monkeypatch, but="experts")


def mistral() -> Any:
    config = transformers.MistralConfig(**QWEN3, sliding_window=5, attn_implementation="sdpa")
    return transformers.MistralForCausalLM(config)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN3)),
    "mistral, window": mistral,
    "gemma2, window and capped scores": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**QWEN3, sliding_window=5, attn_logit_softcapping=0.5, attn_implementation="eager")
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "roberta, causal": lambda: transformers.RobertaForCausalLM(
        transformers.RobertaConfig(**{**TINY, **NO_DROPOUT}, is_decoder=True)
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**{**TINY, **NO_DROPOUT})),
    "esm, scaled by its masks": lambda: transformers.EsmForMaskedLM(
        transformers.EsmConfig(
            **{**TINY, **NO_DROPOUT, "pad_token_id": 0, "position_embedding_type": "rotary"},
            token_dropout=True,
            mask_token_id=int(plain()["input_ids"][0, 3]),
        )
    ),
}


def plain() -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :9] = -100  # another number of targets on each rank
    return {"input_ids": ids, "labels": labels}


def packed() -> dict[str, Any]:
    """Documents of 5, 8 and 3 tokens, and of 9 and 7, whose positions go on after a leap; with a cache transformers
    would take them for one."""
    rows = ((range(5), range(8), range(3)), (range(9), range(12, 19)))
    return {
        **plain(),
        "position_ids": torch.tensor([list(itertools.chain(*documents)) for documents in rows]),
        "use_cache": False,
    }


def padded() -> dict[str, Tensor]:
    """Padding on the left of one row and on the right of the other."""
    batch = plain()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :6], mask[1, -3:] = 0, 0
    # the first token after padding has a label, and padding before it a say in the loss
    return {**batch, "attention_mask": mask, "labels": batch["input_ids"].masked_fill(mask == 0, -100)}


WAYS = ("gather", "ulysses", "ring")
BATCHES = {"plain": plain, "packed": packed, "padded": padded}


def batch_of(name: str, batch: str) -> dict[str, Any]:
    given: dict[str, Any] = BATCHES[batch]()
    if name == "bert":  # without a cache, and transformers takes a row for one document in any case
        given.pop("use_cache", None)
    return given


def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make().double()


def assert_gradients(ctx: tpcore.ParallelContext, model: Any, whole: Any) -> None:
    tpcore.reduce_gradients(model)
    names = dict(whole.named_parameters()).keys()
    assert ctx.mesh.axes.get("pp", 1) > 1 or dict(model.named_parameters()).keys() == names
    assert_same_gradients(model, whole, ctx, EXACT, EXACT)


def assert_equal(
    make: Callable[[], nn.Module],
    mesh: dict[str, int],
    batch: dict[str, Any],
    way: str | None,
    dealt: bool = False,
    recompute: bool = False,
    **options: Any,
) -> None:
    seen = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()

    def run(model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        given = tpcore.shard_sequence(batch, model) if dealt else batch
        *losses, logits = hf.step(model, given)
        return *losses, logits[seen]

    def one(make: Callable[[], nn.Module]) -> Any:
        model = made(make)
        if recompute:  # before it is sharded
            hf.recompute(model)
        return model

    assert_equals_whole(make, (mesh,), batch, run, EXACT, one, context_parallel=way, **options)


CELLS: list[tuple[str, str, dict[str, int], dict[str, bool]]] = [
    *((name, "plain", mesh, {}) for name in MODELS for mesh in (CP2, CP2_TP2)),
    ("roberta, causal", "packed", CP2, {}),
    ("esm, scaled by its masks", "padded", CP2, {"dealt": True}),
    *((name, batch, CP4, {}) for name in ("llama", "mistral, window", "bert") for batch in BATCHES),
    *((name, batch, CP2, {"dealt": True}) for name in ("llama", "bert") for batch in BATCHES),  # by the loader
    *((name, "plain", CP2_TP2, {"sequence_parallel": True, "recompute": True}) for name in ("llama", "gpt2")),
]


# each in one way: what ways and masks do together, an attention by itself shows
IN_A_WAY = [(*cell, WAYS[i % len(WAYS)]) for i, cell in enumerate(CELLS)]


@pytest.mark.parametrize("dealt", [False, True])
def test_a_rank_without_labels_adds_nothing_to_a_masked_models_loss(dealt: bool) -> None:
    batch = plain()
    batch["labels"][:, 8:] = -100
    assert_equal(MODELS["bert"], CP2, batch, "gather", dealt)


@pytest.mark.parametrize(("name", "batch", "mesh", "options", "way"), IN_A_WAY, ids=str)
def test_equals_the_whole_model(
    name: str, batch: str, mesh: dict[str, int], options: dict[str, bool], way: str
) -> None:
    assert_equal(MODELS[name], mesh, batch_of(name, batch), way, **options)


def test_tokens_are_dealt_once_and_counted_by_the_model(tmp_path: Path) -> None:
    torch.save(plain(), tmp_path / "rows")
    mapped = torch.load(tmp_path / "rows", mmap=True)

    def rank(ctx: tpcore.ParallelContext) -> None:
        whole = made(llama)
        assert tpcore.shard_sequence(mapped, whole) == mapped  # nothing is sharded
        model = tpcore.parallelize(whole, context_parallel="ring")
        mine = tpcore.shard_sequence(mapped, model)
        first = [0, 1, 2, 3, 12, 13, 14, 15]  # zig-zag: the first and the last quarter
        places = first if ctx.coord("cp") == 0 else [4, 5, 6, 7, 8, 9, 10, 11]
        assert mine["position_ids"].tolist() == [places]
        assert torch.equal(mine["input_ids"], mapped["input_ids"][:, places])
        with pytest.raises(ValueError, match="one rank's tokens already"):
            tpcore.shard_sequence(mine, model)
        with pytest.raises(ValueError, match="counts the labels of one rank"):
            model(**mine, num_items_in_batch=7)
        with pytest.raises(ValueError, match="cannot deal 15 tokens evenly"):
            tpcore.shard_sequence({"input_ids": mapped["input_ids"][:, :15]}, model)
        with pytest.raises(ValueError, match="not known by positions"):
            model(**{**mine, "attention_mask": torch.ones(2, 1, 1, 8)})

    run_ranks(Mesh(CP2), rank)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES - SIZES.keys()))
def test_every_family_of_the_list(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config = families.class_of(family), families.config_of(family)

    def make() -> Any:
        return kind(copy.deepcopy(config))

    for name in ("router_jitter_noise", "input_jitter_noise"):  # other numbers on each rank
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    if family == "xmod":
        config.default_language = "en_XX"
    with_padding = padded()
    if getattr(config, "attn_logit_softcapping", None) or not kind._supports_sdpa:
        config._attn_implementation = "eager"  # which alone caps scores, and has sinks
        # of a token that sees none, eager attention makes the mean of all values: it has no say in the loss here
        hidden = with_padding["attention_mask"][:, :-1] == 0
        with_padding["labels"][:, 1:].masked_fill_(hidden, -100)
    # by which RoBERTa's kin number their tokens; Gemma 3n's own gradient of a padding's zeros, by a root, is not finite
    if getattr(config, "pad_token_id", None) is not None and family != "gemma3n_text":
        with_padding["input_ids"].masked_fill_(with_padding["attention_mask"] == 0, config.pad_token_id)
    make()  # imports its module
    families.widen(monkeypatch, but="experts")
    for way, batch in (("gather", plain()), ("ring", packed()), ("ulysses", with_padding)):
        if not hasattr(config, "use_cache"):
            batch.pop("use_cache", None)
        assert_equal(make, CP2, batch, way)


CP2_PP2 = {"pp": 2, "dp": 1, "cp": 2, "tp": 1}


STAGES = [("llama", "plain", "gather"), ("mistral, window", "padded", "ulysses"), ("gpt2", "packed", "ring")]


@pytest.mark.parametrize(("name", "batch", "way"), STAGES)
def test_in_pipeline_stages(name: str, batch: str, way: str) -> None:
    given = batch_of(name, batch)
    assert_equal(MODELS[name], CP2_PP2, given, way, num_microbatches=2)
    if (batch, way) == ("packed", "ring"):
        assert_equal(MODELS[name], CP2_PP2 | {"tp": 2}, given, way, num_microbatches=2, sequence_parallel=True)


@pytest.mark.parametrize("way", [*WAYS, "auto"])
def test_one_forward_one_backward(way: str) -> None:
    """Microbatches of as many labels, so that the mean of their losses is the batch's."""
    batch = {**packed(), "labels": packed()["input_ids"].clone()}
    batch["labels"][:, 5] = -100
    whole = made(llama)
    want = whole(**batch).loss
    want.backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        for dealt in (False, True):
            model = tpcore.parallelize(made(llama), context_parallel=way, num_microbatches=2)
            given = tpcore.shard_sequence(batch, model) if dealt else batch
            loss = tpcore.PipelineModel(model, 2).run_train(**given)
            torch.testing.assert_close(loss, want, rtol=EXACT, atol=EXACT)
            assert_gradients(ctx, model, whole)

    run_ranks(Mesh(CP2_PP2), rank)


def routed() -> Any:
    """With a loss of routers of nearly the size of the other one."""
    return hf.mixtral(output_router_logits=True, router_aux_loss_coef=0.5)


ROUTED = [("plain", "ulysses", False), ("padded", "ring", False), ("packed", "ring", True), ("packed", "gather", False)]


@pytest.mark.parametrize(("batch", "way", "dealt"), ROUTED)
def test_the_loss_of_routers_is_that_of_all_tokens(batch: str, way: str, dealt: bool) -> None:
    assert_equal(routed, CP2, BATCHES[batch](), way, dealt=dealt)


@pytest.mark.parametrize("options", [{}, {"expert_parallel": True}, {"sequence_parallel": True}], ids=str)
def test_experts_on_cp_and_tp(options: dict[str, bool]) -> None:
    assert_equal(routed, CP2_TP2, padded(), "ring", **options)


@pytest.mark.parametrize(
    ("mesh", "way"),
    tiers(
        [({"dp": 1, "ep": 2, "cp": 2, "tp": 1}, "ring")],
        [({"dp": 1, "ep": 2, "cp": 2, "tp": 2}, w) for w in WAYS] + [({"dp": 2, "ep": 2, "cp": 2, "tp": 1}, "gather")],
    ),
    ids=str,
)
def test_experts_on_ep_and_cp(mesh: dict[str, int], way: str) -> None:
    """Each ep rank has a row of its own, and a loss of its routers for that row."""
    batch = {name: torch.cat([t, t.flip(1)]) for name, t in plain().items()}
    ranks = mesh["dp"] * mesh["ep"]
    parts = [{name: t.chunk(ranks)[i] for name, t in batch.items()} for i in range(ranks)]
    whole = made(routed)
    losses = [whole(**part).loss for part in parts]
    torch.stack(losses).mean().backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(routed), context_parallel=way)
        at = ctx.index(ctx.batch)
        loss = model(**parts[at]).loss
        torch.testing.assert_close(loss, losses[at], rtol=EXACT, atol=EXACT)
        loss.backward()
        assert_gradients(ctx, model, whole)

    run_ranks(Mesh(mesh), rank)


SEATS = [
    ({"dp": 1, "cp": 2, "tp": 1}, {}),
    ({"dp": 1, "cp": 4, "tp": 1}, {"context_parallel": "ring"}),
    ({"dp": 1, "cp": 2, "tp": 2}, {"expert_parallel": True}),
    ({"dp": 1, "cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ({"dp": 1, "ep": 2, "cp": 2, "tp": 1}, {}),
]


@pytest.mark.parametrize("factor", [0.5, 0.75, 1.25])
@pytest.mark.parametrize(("axes", "options"), SEATS, ids=str)
def test_the_seats_of_experts_are_for_whole_sequences(
    axes: dict[str, int], options: dict[str, Any], factor: float
) -> None:
    rows = {name: torch.cat([t, t.flip(0)]) for name, t in plain().items()}
    ranks = axes.get("ep", 1)
    parts = [{name: t.chunk(ranks)[i] for name, t in rows.items()} for i in range(ranks)]

    def stepped(ctx: tpcore.ParallelContext, **options: Any) -> tuple[Any, float, list[float]]:
        model: Any = tpcore.parallelize(made(routed), capacity_factor=factor, **options)
        load = tpcore_hf.ExpertLoad(model)
        loss = model(**parts[ctx.index(ctx.batch)]).loss
        loss.backward()
        return model, float(loss.detach()), [layer.dropped for layer in load.read().values()]

    one = {"dp": 1, "tp": 1} | ({"ep": ranks} if ranks > 1 else {})
    expected = run_ranks(Mesh(one), lambda ctx: stepped(ctx)[1:])

    def rank(ctx: tpcore.ParallelContext) -> None:
        model, loss, dropped = stepped(ctx, **options)
        want_loss, want_dropped = expected[ctx.index(ctx.batch)]
        assert loss == pytest.approx(want_loss, rel=1e-7)
        assert dropped == pytest.approx(want_dropped)
        experts = model.model.layers[0].mlp.experts
        with pytest.raises(ValueError, match="outside of the module that takes"):
            experts(torch.zeros(4, 32).double(), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2).double())

    run_ranks(Mesh(axes), rank)
    assert (max(expected[0][1]) > 0) == (factor < 1)


def test_seats_of_an_all_to_all_are_for_a_rank() -> None:
    options = {"dispatch": "all_to_all", "capacity_factor": 1.0}
    hf.refused("seats would be for a rank's own tokens", routed, {"dp": 1, "ep": 2, "cp": 2, "tp": 1}, **options)


def test_hooks_outside_of_the_layers_see_whole_sequences() -> None:
    """NEFTune's noise depends on the number of tokens; so may any other hook before and after the layers."""

    def hooked(model: Any) -> Any:
        table = model.get_input_embeddings()
        table.neftune_noise_alpha = 5.0
        table.register_forward_hook(neftune_post_forward_hook)
        model.transformer.drop.register_forward_hook(lambda module, args, y: y * y.shape[1])
        model.transformer.ln_f.register_forward_pre_hook(
            lambda module, args: (args[0] + args[0].mean(1, keepdim=True),)
        )
        return model.train()

    def loss_of(model: Any) -> Tensor:
        torch.manual_seed(3)
        return hooked(model)(**padded()).loss  # type: ignore[no-any-return]

    whole = made(MODELS["gpt2"])
    want = loss_of(whole)
    want.backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(MODELS["gpt2"]), context_parallel="ring")
        loss = loss_of(model)
        torch.testing.assert_close(loss, want, rtol=EXACT, atol=EXACT)
        loss.backward()
        assert_gradients(ctx, model, whole)

    for axes in (CP2, CP2_TP2):
        run_ranks(Mesh(axes), rank)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dropout in attention": (lambda: llama(attention_dropout=0.1), "attention_dropout=0.1: .*set it to 0"),
    "an encoder with a decoder": (
        lambda: transformers.BartForConditionalGeneration(families.config_of("bart")),
        "encoder with a decoder",
    ),
    "RWKV": (lambda: transformers.RwkvForCausalLM(families.config_of("rwkv")), "Rwkv.* passes a state .*of its own"),
    "T5's biases": (lambda: transformers.T5EncoderModel(families.config_of("t5")), "bias for each distance"),
    "another task": (
        lambda: transformers.LlamaForSequenceClassification(llama().config),
        "none of ForCausalLM.*whose loss is of each token",
    ),
    "a family that was not compared": (
        lambda: transformers.LayoutLMForMaskedLM(families.config_of("layoutlm")),
        "not compared",
    ),
    "rotary positions by length": (
        lambda: llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        "type dynamic depend on the longest sequence",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_wrong_is_refused_before_any_change(what: str) -> None:
    make, why = REFUSED[what]
    hf.refused(f"cannot have its tokens cut over cp=2 ranks: .*{why}", make, CP2)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "attention weights": ({"output_attentions": True}, "output_attentions=True with context parallelism"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states=True with context parallelism"),
    "a cache": ({"use_cache": True}, "generate on a model that was parallelized without it"),
    "some logits": ({"logits_to_keep": 1}, "logits_to_keep with context .* generate on a model that was parallelized"),
    "a mask of pairs": ({"attention_mask": torch.ones(2, 1, 16, 16)}, "not known by positions"),
    "labels of a row": ({"labels": torch.ones(2, dtype=torch.long)}, r"are not \[batch, tokens\]"),
    "a tuple": ({"return_dict": False}, "return_dict=False with context parallelism"),
    "another tensor": ({"token_weights": torch.ones(2, 16)}, "does not know how to cut token_weights"),
    "one sequence without a batch": (
        {"input_ids": torch.ones(16, dtype=torch.long)},
        r"deals input_ids \[batch, tokens\] .* not a tensor of shape \(16,\)",
    ),
    "no tokens": ({"input_ids": None}, r"deals input_ids .*, not None"),
    "a longer mask": (
        {"attention_mask": torch.ones(2, 20)},
        r"attention_mask of shape \(2, 20\) beside 16 tokens: pass",
    ),
    "fewer labels": (
        {"labels": torch.ones(2, 12).long()},
        r"labels of shape \(2, 12\) beside 16 tokens: .* \[batch, 16\]",
    ),
    "places without a batch": ({"position_ids": torch.arange(16)}, r"position_ids of shape \(16,\) beside 16 tokens"),
    "a length": ({"input_ids": torch.ones(2, 18, dtype=torch.long)}, "cannot deal 18 tokens evenly: .* of 4, 20"),
}


@pytest.mark.parametrize("what", CALLS)
@each_rank(**CP2)
def test_a_call_that_would_be_wrong_is_refused(ctx: tpcore.ParallelContext, what: str) -> None:
    options, why = CALLS[what]
    model = tpcore.parallelize(made(llama), context_parallel="ring")
    with pytest.raises(ValueError, match=why):
        model(**({"input_ids": plain()["input_ids"]} | options))


@pytest.mark.parametrize("make", [llama, MODELS["bert"], routed])
def test_a_model_below_the_head_has_tokens_that_are_dealt(make: Callable[[], Any]) -> None:
    batch = {"input_ids": plain()["input_ids"]}
    want = made(make).eval().base_model(**batch).last_hidden_state

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(make), context_parallel="ring").eval()
        for ids in ({}, {"attention_mask": torch.ones_like(batch["input_ids"])}):
            with pytest.raises(ValueError, match=r"has one rank's tokens .* pass what tpcore.shard_sequence makes"):
                model.base_model(**batch, **ids)
        mine = model.base_model(**tpcore.shard_sequence(batch, model)).last_hidden_state
        order = TokenOrder(ctx.comm("cp"), zigzag=not hasattr(model, "bert"))
        torch.testing.assert_close(mine, order.cut(want), rtol=EXACT, atol=EXACT)

    run_ranks(Mesh(CP2), rank)


@each_rank(**CP2)
def test_what_is_changed_afterwards_or_differs_between_ranks_is_refused(ctx: tpcore.ParallelContext) -> None:
    model, batch = tpcore.parallelize(made(llama)), plain()
    with pytest.raises(ValueError, match="ranks 0 and 1 of cp differ in labels: every rank of cp gets the whole"):
        model(**batch | {"labels": batch["labels"] + ctx.coord("cp")})
    at = ctx.coord("cp")
    others = {"attention_mask": torch.ones(2, 16).index_fill(1, torch.tensor(at), 0), "num_items_in_batch": 7 + at}
    others |= {"position_ids": torch.arange(16)[None] + at}
    for name, value in others.items():
        model = tpcore.parallelize(made(llama))
        with pytest.raises(ValueError, match=f"ranks 0 and 1 of cp differ in {name}"):
            model(**batch | {name: value})
        with pytest.raises(ValueError, match=r"ranks 0 and 1 of cp have .*: every rank of cp gets the whole batch"):
            model(**batch | ({name: value} if at else {}))  # what is refused is looked for again
    model(**batch)
    with use(replace(ctx, observer=raising())), pytest.raises(ValueError, match="ranks 0 and 1 of cp differ in labels"):
        model(**batch | {"labels": batch["labels"] + at})  # in a checked run not once, but each time
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention 'sdpa' was set after parallelize"):
        model(**batch)


def _squares(logits: Tensor, labels: Tensor) -> Tensor:
    """For each counted token: a loss of one's own."""
    kept = labels.flatten() != -100
    return kept * (logits.flatten(0, 1).softmax(-1) - F.one_hot(labels.flatten() * kept, logits.shape[-1])).pow(2).sum(
        -1
    )


def _sum(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **options: Any) -> Tensor:
    labels = options.get("shift_labels")
    return _squares(logits, labels).sum() / num_items_in_batch


def _mean(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    labels = options["shift_labels"]
    return _squares(logits, labels).sum() / (labels != -100).sum()


def _shifting(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any) -> Tensor:
    return _squares(logits, F.pad(labels, (0, 1), value=-100)[:, 1:]).sum() / num_items_in_batch


@pytest.mark.parametrize("mesh", [CP2, CP2_TP2], ids=["cp2", "cp2 tp2"])
def test_a_loss_of_ones_own_that_counts_the_labels_of_all_ranks(mesh: dict[str, int]) -> None:
    batch = plain()
    shifted = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    whole = made(llama)
    want = _squares(whole(batch["input_ids"]).logits, shifted).sum() / (shifted != -100).sum()
    want.backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made(llama)
        model.loss_function = _sum
        model = tpcore.parallelize(model, context_parallel="gather")
        loss = model(**batch).loss
        loss.backward()
        torch.testing.assert_close(loss, want, rtol=EXACT, atol=EXACT)
        assert_gradients(ctx, model, whole)

    run_ranks(Mesh(mesh), rank)


@pytest.mark.parametrize("loss", [_mean, _shifting])
def test_a_loss_of_ones_own_that_ranks_cannot_add_up_is_refused(loss: Callable[..., Tensor]) -> None:
    batch = plain()
    batch["labels"][:, 7:] = -100  # the second rank has no targets, and is told too

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = made(llama)
        model.loss_function = loss
        model = tpcore.parallelize(model, context_parallel="gather")
        with pytest.raises(ValueError, match=f"{loss.__name__} with context .* divide their sum by num_items_in_batch"):
            model(**batch)
        model.loss_function = _sum
        with pytest.raises(ValueError, match="loss_function was replaced after parallelize"):
            model(**batch)

    run_ranks(Mesh(CP2), rank)


@pytest.mark.parametrize("dealt", [False, True])
@pytest.mark.parametrize(("length", "way"), [(16, "gather"), (256, "ring")])
def test_the_way_is_chosen_for_each_length(
    length: int, way: str, dealt: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ids = torch.randint(3, 99, (2, length), generator=torch.Generator().manual_seed(1))
    assert_equal(
        lambda: llama(max_position_embeddings=256), CP4, {"input_ids": ids, "labels": ids}, "auto", dealt=dealt
    )
    assert caplog.text.count(f"context_parallel='auto' is {way!r} for {length} tokens over cp=4") == 1


def test_ways_and_degrees_that_do_not_fit() -> None:
    mesh = {"dp": 1, "cp": 3, "tp": 1}
    hf.refused("'gather' or 'ulysses' or 'ring' or 'auto', not 'rings'", llama, mesh, context_parallel="rings")
    hf.refused("4 heads fit cp=1, 2, 4 only", llama, mesh, context_parallel="ulysses")


def stepped(name: str, batch: str, step: int) -> dict[str, Any]:
    """Other tokens in each step. Rows have as many labels, so that the mean of their losses is the batch's."""
    given = batch_of(name, batch)
    made = torch.Generator().manual_seed(step)
    given["input_ids"] = torch.randint(3, 99, given["input_ids"].shape, generator=made)
    unseen = torch.zeros(2, 16, dtype=torch.bool)
    unseen[0, :7], unseen[1, -7:] = True, True
    given["labels"] = given["input_ids"].masked_fill(unseen, -100)
    return given


def rows_of(batch: dict[str, Any], count: int) -> list[dict[str, Any]]:
    return [{k: t.chunk(count)[i] if isinstance(t, Tensor) else t for k, t in batch.items()} for i in range(count)]


TWENTY: list[tuple[str, str, dict[str, int], str, dict[str, Any]]] = [
    ("llama", "padded", {"dp": 2, "cp": 2, "tp": 1}, "ring", {}),  # and Zero1
    ("gpt2", "plain", CP4, "ulysses", {}),
    ("mistral, window", "packed", CP2, "auto", {}),
    ("gemma2, window and capped scores", "plain", CP2, "gather", {}),
    ("qwen3", "padded", CP2_TP2, "ring", {"sequence_parallel": True}),
    ("bert", "packed", CP2_PP2, "gather", {"num_microbatches": 2}),
    ("llama", "packed", CP2_PP2, "auto", {"num_microbatches": 2}),
]


@pytest.mark.parametrize(("name", "batch", "axes", "way", "options"), tiers(TWENTY[:2], slow=TWENTY), ids=str)
def test_twenty_steps(name: str, batch: str, axes: dict[str, int], way: str, options: dict[str, Any]) -> None:
    batches = [rows_of(stepped(name, batch, step), axes["dp"]) for step in range(20)]
    # a large eps: AdamW divides by the root of small gradients, which enlarges what the order of sums changes
    adamw: dict[str, Any] = {"lr": 0.01, "eps": 1e-3}
    whole = made(MODELS[name])
    want = hf.plain_steps(whole, torch.optim.AdamW(whole.parameters(), **adamw), batches)

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(made(MODELS[name]), context_parallel=way, **options)
        make = partial(tpcore.Zero1, torch.optim.AdamW) if axes["dp"] > 1 else torch.optim.AdamW
        found = hf.parallel_steps(ctx, model, make(model.named_parameters(), **adamw), batches)
        torch.testing.assert_close(found[::2], want[::2], rtol=EXACT, atol=EXACT)  # losses
        torch.testing.assert_close(found[1::2], want[1::2], rtol=1e-10, atol=1e-11)  # norms
        for key, p in model.named_parameters():
            # what steps divided by small numbers, 20 times
            full = whole.get_parameter(key).detach()
            torch.testing.assert_close(p.detach(), part_of(full, p, ctx), rtol=1e-10, atol=1e-11)

    run_ranks(Mesh(axes), rank)


def test_gradients_of_logits_that_a_loop_scores_itself() -> None:
    def run(model: Any, batch: dict[str, Any]) -> tuple[Tensor]:
        logits, targets = model(**batch).logits[:, :-1], batch["input_ids"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        return (loss.detach(),)

    assert_equals_whole(llama, (CP2,), {"input_ids": plain()["input_ids"]}, run, EXACT, made)


@pytest.mark.parametrize("mesh", [CP2, CP2_TP2], ids=["cp2", "cp2 tp2"])
def test_logits_that_a_loop_gives_to_the_models_loss(mesh: dict[str, int]) -> None:
    """With shift_labels alone, as where a loop has shifted them: each rank scores the logits of its own tokens."""
    batch = plain()
    batch["shift_labels"] = F.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()

    def run(model: Any, batch: dict[str, Any]) -> tuple[Tensor]:
        mine = tpcore.shard_sequence(batch, model)
        logits, labels = model.train()(**mine).logits, mine["shift_labels"]
        loss = model.loss_function(logits=logits, labels=labels, shift_labels=labels, vocab_size=99)
        loss.backward()
        return (loss.detach(),)

    assert_equals_whole(llama, (mesh,), batch, run, EXACT, made, context_parallel="ring")
