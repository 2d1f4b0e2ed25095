"""Plans for model families without a plan in transformers. Each file covers one structure of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..plan import Rule

FILES = {
    "albert": "albert",
    "bart": "bart bigbird_pegasus biogpt blenderbot blenderbot-small m2m_100 marian mbart mvp "
    "opt pegasus plbart speech_to_text whisper xglm",
    "bert": "bert bert-generation camembert data2vec-text dpt electra ernie esm layoutlm markuplm "
    "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer splinter videomae visual_bert "
    "xlm-roberta xlm-roberta-xl xmod yolos",
    "better": "apertus glm glm4 glm4v_text glm_image_text glm_ocr_text phi3",
    "bloom": "bloom falcon gpt_neox_japanese persimmon",
    "deberta": "deberta-v2",
    "distilbert": "distilbert flaubert xlm",
    "gpt2": "gpt2 openai-gpt",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neo": "gpt_neo",
    "gptj": "gptj",
    "llama": "hunyuan_v1_dense stablelm",
    "modernbert": "modernbert modernbert-decoder",
    "mpnet": "mpnet",
    "mpt": "mpt",
    "t5": "longt5 mt5 t5 umt5",
    "vit": "audio-spectrogram-transformer beit clip clip_text_model clip_vision_model data2vec-audio deit "
    "dinov2 dinov2_with_registers hubert ijepa siglip_vision_model siglip2_vision_model vit vit_mae vit_msn "
    "vivit wav2vec2 siglip_text_model siglip2_text_model",
    "qwen_vision": "qwen2_vl_vision qwen2_5_vl_vision",
}
"""For each file, the ``model_type`` of its families."""

_ONE = "it is several models in one, which were not compared with the whole after a cut"
_ALONE = "a cut one was not compared with the whole"

_NO_ATTENTION = "its layers carry a state along the sequence, and have no attention to shard"

REFUSED = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _NO_ATTENTION),
    **dict.fromkeys(("llama4", "muse_glimmer", "muse_spark", "phi4_multimodal"), _ONE),
    **dict.fromkeys(("gemma4_vision", "muse_glimmer_assistant", "muse_glimmer_vision"), _ALONE),
    "doge": "its own plan cuts the values that all its heads share",
    "neomme": "each of its heads is scaled by an entry of one parameter",
    "esmc": "its own plan cuts heads on which one norm works",
}
"""Families whose own plan is wrong, or was not compared, with the reason."""


def file_of(model_type: str) -> str | None:
    """The module in this package that has the rules of a family."""
    return next((file for file, kinds in FILES.items() if model_type in kinds.split()), None)


def rules_of(config: Any) -> Mapping[str, Rule]:
    """The rules of a family, with names of its base model or its stacks of layers; {} if it is unknown."""
    file = file_of(getattr(config, "model_type", ""))
    if file is None:
        return {}
    rules: Callable[[Any], Mapping[str, Rule]] = import_module(f"{__name__}.{file}").rules
    return rules(config)
