"""Models whose layers pass a state from token to token, with their tokens on several ranks: loss and every gradient are
those of the whole model."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import any_model, families, hf
from helpers.states import PLANS, SIZES
from helpers.tiers import tiers
from helpers.worlds import each_rank
from test_context_parallel_models import BATCHES, CP2, CP2_PP2, CP2_TP2, CP4, WAYS, assert_equal
from torch import Tensor

import tpcore
from tpcore import Mesh
from tpcore.layers.tokens import TokenOrder
from tpcore.testing import run_ranks
from tpcore_hf.sequence.states import DealtStates

CELLS: list[tuple[str, str, dict[str, int], str, dict[str, bool]]] = [
    ("qwen3_next", "padded", CP4, "ring", {}),  # chunks of 2 tokens, of which a convolution sees 3 before its own
    ("qwen3_next", "plain", CP2_TP2, "gather", {"sequence_parallel": True, "recompute": True}),
    ("qwen3_5_moe_text", "plain", CP4, "gather", {"dealt": True}),
    ("kimi_linear", "padded", CP2_TP2, "ulysses", {"recompute": True}),
    ("bamba", "packed", CP2, "ring", {"dealt": True}),
    ("mamba2", "padded", CP4, "auto", {"dealt": True}),
    ("jamba", "padded", CP4, "ring", {}),
    ("granitemoehybrid", "packed", CP4, "ring", {}),  # one document, as in transformers
    ("falcon_h1", "padded", CP2_TP2, "ring", {}),
    ("lfm2_moe", "padded", CP4, "ring", {}),
]


def slow() -> list[Any]:
    """Each family with each batch, in one of the ways, on either mesh by turns."""
    points = itertools.product(SIZES, zip(BATCHES, WAYS, strict=True))
    return [(name, batch, (CP4, CP2_TP2)[i % 2], way, {}) for i, (name, (batch, way)) in enumerate(points)]


def plan_of(family: str) -> dict[str, str]:
    if family in families.families():
        return {}
    if family not in PLANS:
        pytest.skip(f"this transformers' {family} is refused: its experts take no part of all")
    return PLANS[family]


def made(family: str, **options: Any) -> Any:
    kind, config = families.class_of(family), families.config_of(family, **{**SIZES[family], **options})
    assert kind is not None
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    return kind(copy.deepcopy(config))


@pytest.mark.parametrize(("family", "batch", "mesh", "way", "options"), tiers(CELLS, slow()), ids=str)
def test_equals_the_whole_model(
    family: str, batch: str, mesh: dict[str, int], way: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = BATCHES[batch]() | {"use_cache": False}
    made(family)  # imports its module
    families.widen(monkeypatch, but="experts")
    assert_equal(lambda: made(family), mesh, given, way, plan=plan_of(family), **options)


def test_in_pipeline_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    made("mamba2")
    families.widen(monkeypatch)
    given = BATCHES["padded"]()
    assert_equal(lambda: made("mamba2"), CP2_PP2, given, "gather", num_microbatches=2, plan=plan_of("mamba2"))


def test_ranks_have_one_program(tmp_path: Path) -> None:
    config = families.config_of("qwen3_next", **SIZES["qwen3_next"])
    config.architectures = ["Qwen3NextForCausalLM"]
    config.save_pretrained(tmp_path)
    step = tpcore.explain(str(tmp_path), cp=4, seq_len=64, plan="auto", context_parallel="ring", ranks=[0, 3])
    first, last = (step.program(rank).collectives for rank in (0, 3))
    assert first == last
    assert any(call.op.startswith("all_to_all") for call in first if call.axes == ("cp",))


@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("count", [3, 4])
def test_positions_of_a_grid(count: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of time, height and width, after those of the text if there are 4, by which documents are told apart."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}

    def make() -> Any:
        return made("qwen3_5_text", rope_parameters=sections)

    make()
    families.widen(monkeypatch, but="experts")
    given: dict[str, Any] = BATCHES["packed"]() | {"use_cache": False}
    grids = torch.randint(0, 9, (3, 2, 16), generator=torch.Generator().manual_seed(3))
    given["position_ids"] = grids if count == 3 else torch.cat([given["position_ids"][None], grids])
    assert_equal(make, CP2, given, way)
    assert_equal(make, CP4, given, way, dealt=True)


@pytest.mark.parametrize(("family", "mesh", "way"), [("qwen3_vl", CP2_TP2, "ring"), ("llava", CP4, "gather")], ids=str)
def test_images_among_the_tokens(family: str, mesh: dict[str, int], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of qwen3_vl what the tower sees is added in layers too."""

    def make() -> Any:
        config = any_model.tiny(family)
        config.vision_config.deepstack_visual_indexes = [0, 1]
        return any_model.class_for(family)(config)

    batch = any_model.batch_for(any_model.made(any_model.class_for(family), any_model.tiny(family)))
    assert "pixel_values" in batch
    more = -batch["input_ids"].shape[1] % 8
    batch = {
        name: F.pad(t, (0, more), value=5) if t.shape == batch["input_ids"].shape else t for name, t in batch.items()
    }
    places = batch.get("mm_token_type_ids", torch.zeros(0))
    batch["attention_mask"][0, -3:], places[..., -more:] = 0, 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    families.widen(monkeypatch, but="experts")
    whole = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    assert_equal(make, mesh, {**whole, "use_cache": False}, way)


def test_images_with_masks_of_their_own_are_refused() -> None:
    config = transformers.Gemma3Config(text_config=families.config_of("gemma3_text").to_dict())
    why = (
        "cannot have its tokens cut over cp=2 ranks: it puts what a tower sees, images for instance, among the tokens, "
        "and only llava, qwen2_5_vl, qwen3_vl were compared so"
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForConditionalGeneration(config)
    hf.refused(why, lambda: model, CP2)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "kimi_linear"])
def test_heads_that_ranks_do_not_divide_are_refused_before_any_change(family: str) -> None:
    heads = 4 if family == "kimi_linear" else 8
    why = f"cp=3|over 3 ranks deals the heads of .* and its {heads} heads fit cp=1, 2, 4"
    hf.refused(why, lambda: made(family), {"dp": 1, "cp": 3, "tp": 1}, plan=plan_of(family))


@each_rank(cp=2)
def test_heads_of_a_scan_are_counted_in_a_call(ctx: tpcore.ParallelContext) -> None:
    states = DealtStates(ctx.comm("cp"), lambda tokens: TokenOrder(ctx.comm("cp")))
    with pytest.raises(ValueError, match="its 3 heads fit cp=1, 3 only"):
        states.scanned(lambda x: x, torch.ones(1, 4, 3, 2))


def kept(run: Any) -> int:
    """Bytes that autograd keeps of a step, each memory once."""
    found: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run()
    return sum(found.values())


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "mamba2"])
def test_what_a_rank_keeps_falls_as_its_tokens_do(family: str) -> None:
    ids = torch.randint(3, 99, (1, 512), generator=torch.Generator().manual_seed(1))

    def step(ctx: tpcore.ParallelContext) -> int:
        model = tpcore.parallelize(made(family), context_parallel="ulysses", plan=plan_of(family)).train()
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return kept(lambda: model(input_ids=ids, labels=ids, use_cache=False)) - sum(weights.values())

    whole, halves, quarters = (run_ranks(Mesh({"dp": 1, "cp": cp, "tp": 1}), step) for cp in (1, 2, 4))
    for parts in (halves, quarters):
        assert max(parts) < 1.05 * whole[0] / len(parts)
