"""Families of transformers: each works, equal to the whole model, or is refused; nothing in between."""

from __future__ import annotations

import re
from typing import Any

import pytest
import transformers
from helpers.any_model import compared_types, lacking, verdict_of
from helpers.composed import CASES, composed
from helpers.families import (
    FEATURES,
    PAGE_FILE,
    PARTS,
    SINGLE,
    Whole,
    class_of,
    config_of,
    families,
    on_the_page,
    short,
    verdict,
    widen,
)
from helpers.tiers import tiers

from tpcore_hf.plan.families import KINDS

MADE_WITH = re.search(r"transformers (\d+\.\d+\.\d+)", PAGE_FILE.read_text())[1]  # type: ignore[index]
WORKING, REFUSED, PARTS_THERE = map(on_the_page, ("Work", "Refused", "Parts of models"))
LIST = "bert roberta distilbert electra albert gpt2 gpt_neo gptj opt bloom falcon t5 bart vit whisper"
OTHERS = "clip_text_model mpt modernbert deberta-v2 mpnet openai-gpt gpt_bigcode apertus glm4 phi3 olmo2 cohere2"

# what transformers and torch say while tiny models of odd sizes are made
pytestmark = pytest.mark.filterwarnings("ignore")


WORK = f"{LIST} {OTHERS}".split()
OURS = set(KINDS)


newest = pytest.mark.skipif(
    transformers.__version__ != MADE_WITH,
    reason="older releases have no plan for the features of some experts, and none that pass by those of other ranks",
)


@pytest.mark.parametrize(
    ("family", "degree", "features"),
    [
        *((family, 2, {}) for family in WORK),
        *((family, 4, {}) for family in ("bert", "gptj", "t5", "bloom", "falcon", "vit", "phi3")),
        pytest.param("mimo_v2_flash", 4, {}, marks=newest),
        *((family, 2, features) for family in FEATURES for features in FEATURES[family]),
        ("stablelm", 4, {"qk_layernorm": True}),
        ("cohere", 4, {"use_qk_norm": True}),
    ],
    ids=str,
)
def test_a_family_equals_the_whole(family: str, degree: int, features: dict[str, Any]) -> None:
    assert verdict(family, degree, features).works


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_vl_moe_text"])
def test_norms_of_heads_need_no_rule_where_experts_stay_whole(family: str) -> None:
    base = "" if family.endswith("_text") else "model."
    plan = {f"{base}layers.*.mlp.experts": "replicate"}
    features = {"use_qk_norm": True} if family == "glm4_moe" else {}
    assert verdict(family, 2, features, plan=plan).works


@pytest.mark.parametrize("name", ["SiglipModel", "Gemma3ForConditionalGeneration"])
def test_a_multimodal_model_equals_the_whole(name: str) -> None:
    assert composed(name).share < 0.8


# gathered around norms of all features, hybrids of attention, convolutions and states, work between blocks, sounds,
# states alone, and attention that reads the width of all heads elsewhere; tables and heads with forwards of their own,
# a decoder whose configuration has a type of its own, tiles of images
SAMPLE = ("bitnet", "lfm2", "falcon_h1", "qwen3_vl", "glmasr", "idefics2", "xlnet", "cpmant", "mamba2", "trocr")
SAMPLE += ("dory", "idefics", "musicgen", "mllama", "qwen3_omni_moe_thinker")
# a decoder with the encoder's experts, sizes that are tensors, a table of biases of heads
SAMPLE += ("diffusion_gemma", "inkling_mm_model", "phi4_multimodal")


@newest
@pytest.mark.parametrize("model_type", tiers(["bitnet", "lfm2", "mamba2"], slow=SAMPLE))
def test_rules_that_are_found_equal_the_whole(model_type: str) -> None:
    found = verdict_of(model_type)
    assert found.works, found.text
    assert found.share < 0.85


@newest
def test_ranks_have_the_same_key_heads_where_linear_layers_are_inside_others() -> None:
    assert verdict_of("gemma4", 4).works


@newest
@pytest.mark.drill  # a hundred types
@pytest.mark.parametrize("model_type", compared_types())
def test_all_rules_that_are_found_equal_the_whole_on_two_ranks_and_four(model_type: str) -> None:
    if lacking(model_type):
        pytest.skip("its tower is one of timm, which is not installed")
    assert verdict_of(model_type).works
    found = verdict_of(model_type, 4)
    assert found.works or "does not fit" in found.text, found.text


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_class_of_the_page_equals_the_whole(name: str) -> None:
    found = composed(name)
    assert on_the_page("Multimodal models and other heads")[name] == f"{found.share:.0%}"


# experts at the top level of their names, transposed, in turns with biases and sinks, beside shared ones, without ids
EXPERTS = ("mixtral", "qwen2_moe", "aria_text", "gpt_oss", "deepseek_v2", "llama4_text", "longcat_flash")
WHOLE_EXPERTS = ("mixtral", "qwen2_moe", "deepseek_v2", "aria_text", "granitemoe_swa")


@newest
@pytest.mark.parametrize(
    ("family", "whole", "most"),
    [*((family, False, 0.6) for family in EXPERTS), *((family, True, 0.65) for family in WHOLE_EXPERTS)],
)
def test_a_rank_has_features_of_experts_or_some_of_them(family: str, whole: bool, most: float) -> None:
    found = verdict(family, **({"expert_parallel": True} if whole else {}))
    assert found.works
    assert found.share < most


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama4_text", {"expert_parallel": True}, "computes with all experts at once"),
        ("gpt_oss", {"expert_parallel": True}, "computes with all experts at once"),
        ("llama", {"expert_parallel": True}, "LlamaForCausalLM has no layers of experts"),
    ],
)
def test_what_experts_are_refused_is_said(family: str, options: dict[str, Any], words: str) -> None:
    assert words in verdict(family, **options).text


@pytest.mark.skipif(
    transformers.__version__ != MADE_WITH, reason=f"the page is of transformers {MADE_WITH}: other releases have others"
)
def test_the_page_has_every_family() -> None:
    assert PARTS_THERE.keys() == PARTS.keys()
    assert WORKING.keys() | REFUSED.keys() <= set(families())
    assert not WORKING.keys() & REFUSED.keys()
    assert OURS - WORKING.keys() <= PARTS.keys()
    assert len(REFUSED) <= 6
    assert {*WORK} <= WORKING.keys()


NAMES = """
afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
dots3_note_text ernie4_5_moe exaone_moe flex_olmo flint gemma4_text glm4_moe glm4_moe_lite glm4v_moe_text glm5_next_text
glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 inkling2_text
inkling_text jamba kimi_linear kolibri1 laguna lfm2_moe llama4_text longcat_flash mellum mimo_v2_flash minimax
minimax_m2 minimax_m3_vl_text mistral4 mistral_large4_text mixtral muse_spark_text nemotron_h nllb-moe olmoe
openai_privacy_filter phimoe qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen4_exp_text solar_open
switch_transformers zaya
"""
OF_EXPERTS = NAMES.split()
BY_FEATURES = ("glm5_next_text", "gpt_oss", "inkling2_text", "llama4_text", "longcat_flash", "nllb-moe")
BY_FEATURES += ("openai_privacy_filter", "switch_transformers")
BY_FEATURES += ("muse_spark_text",)  # its experts have a norm, and stay whole


@newest
@pytest.mark.slow
@pytest.mark.parametrize("family", OF_EXPERTS)
def test_all_families_of_experts_on_two_ranks_and_four(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and routers in float64, in which the order of sums is all that differs; by features, then by experts."""
    kind, config = class_of(family), config_of(family)
    assert kind is not None
    kind(config)  # imports its module
    if family not in SINGLE:  # whose widened parts would meet float32
        widen(monkeypatch)
    whole = Whole.of(kind, config)
    for degree in (2, 4):
        for distributed in (False, True):
            outcome = whole.compared(degree, **({"expert_parallel": True} if distributed else {}))
            if isinstance(outcome, str):
                assert distributed, outcome
                assert family in BY_FEATURES, outcome
            else:
                assert outcome[0] < (1e-4 if family in SINGLE else 1e-12)


@newest
@pytest.mark.drill  # two hundred families, twice
@pytest.mark.parametrize("family", sorted(WORKING))
def test_all_families_on_four_ranks_and_with_sharded_tokens(family: str) -> None:
    """Equal to the whole, or refused with the reason: that a module mixes the tokens of which each rank has some."""
    assert verdict(family, 4).works
    for degree in (2, 4):
        found = verdict(family, degree, sequence_parallel=True)
        assert found.works or found.text.startswith("sequence_parallel=True: "), found.text


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_the_page_refuses_is_refused(family: str) -> None:
    """That the others work is a law of test_laws_of_families.py."""
    assert REFUSED[family] == short(verdict(family).text)
