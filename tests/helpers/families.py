"""Every family of transformers with a plan of its own or of tpcore's: a tiny model of it, cut and compared.

``PYTHONPATH=tests python -m helpers.families --table > docs/families.md`` writes the page of all.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import tpcore
from helpers.places import ROOT
from tpcore import Mesh
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks
from tpcore_hf.generate.cached import check_takes_cache
from tpcore_hf.plan.families import KINDS
from tpcore_hf.shard.figures import summary_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

transformers.logging.set_verbosity_error()

PAGE_FILE = ROOT / "docs" / "families.md"


def _named(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_named("hidden_size d_model n_embd dim embed_dim emb_dim embedding_size word_embed_proj_dim", 32),
    **_named("intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim mlp_dim", 64),
    **_named("ffn_hidden_size shared_intermediate_size dense_intermediate_size", 64),
    **_named("num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers", 2),
    **_named("num_decoder_layers num_encoder_layers", 2),
    **_named("num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads", 4),
    **_named("num_key_value_heads num_kv_heads multi_query_group_num", 2),
    **_named("head_dim d_kv linear_head_dim linear_key_head_dim linear_value_head_dim", 8),
    **_named("linear_num_heads linear_num_key_heads linear_num_value_heads index_n_heads", 4),
    **_named("index_head_dim", 16),
    **_named("max_position_embeddings n_positions max_seq_len max_source_positions max_target_positions n_ctx", 64),
    **_named("max_2d_position_embeddings max_xpath_tag_unit_embeddings max_xpath_subs_unit_embeddings", 64),
    **_named("pad_token_id", 0),
    **_named("image_size", 32),
    **_named("patch_size num_mel_bins hidden_size_per_layer_input", 8),
    **_named("vocab_size vocab_size_per_layer_input", 99),
    **_named("num_labels", 3),
    **_named("rotary_dim sliding_window window_size", 4),
    **_named("bos_token_id", 1),
    **_named("eos_token_id", 2),
    **_named("max_length", 24),
    **_named("num_kv_shared_layers", 0),
    **_named("mask_time_prob apply_spec_augment", 0),
}
DROPOUTS = (
    "hidden_dropout_prob attention_probs_dropout_prob dropout attention_dropout activation_dropout "
    "hidden_dropout resid_pdrop embd_pdrop attn_pdrop resid_dropout embed_dropout dropout_rate "
    "classifier_dropout layerdrop encoder_layerdrop decoder_layerdrop attn_dropout residual_dropout "
    "drop_path_rate feat_proj_dropout final_dropout ffn_dropout embedding_dropout mlp_dropout "
    "summary_first_dropout"
)
SIZES |= _named(DROPOUTS, 0.0)
SIZES |= {
    **_named("moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size", 32),
    **_named("n_routed_experts num_experts num_local_experts moe_num_experts", 4),
    **_named("num_experts_per_tok moe_topk top_k_experts moe_k", 2),
    **_named("first_k_dense_replace num_dense_layers n_group topk_group n_shared_experts", 1),
}
OPTIONAL = {"num_key_value_heads", "head_dim", "pad_token_id", "n_inner", "num_kv_heads"}
OF_PARTS: dict[str, Any] = {
    **_named("depth", 2),
    **_named("out_hidden_size encoder_hidden_size projection_dim output_dim projection_hidden_size", 32),
    **_named("downsample_hidden_size", 32),
    **_named("max_encoder_position_embeddings max_decoder_position_embeddings", 64),
    **_named("image_token_id image_token_index", 98),
    **_named("audio_token_id audio_token_index", 97),
    **_named("video_token_id video_token_index", 96),
}
"""Sizes of the models in a model."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {**ROPE, "mrope_section": [1, 1, 2]}
WHOLE_ROPE = {"partial_rotary_factor": 1.0}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8}
PICTURE = {"image_size": 32, "patch_size": 8, "num_attention_heads": 4, "intermediate_size": 64}
SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "bamba": {**HYBRID, "attn_layer_indices": [1], "mamba_d_state": 16},
    "falcon_h1": {**HYBRID, "mamba_d_ssm": 64, "mamba_d_state": 16},
    **_named("pix2struct_vision_model kosmos_2_5_vision_model", {"patch_embed_hidden_size": 192}),
    **_named("granite_speech granite_speech_plus", {"window_size": 15}),
    **_named("granite_speech_encoder granite_speech_plus_encoder", {"hidden_dim": 32}),
    "fun_asr_nano_encoder": {"max_position_embeddings": 65},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "idefics": {"cross_layer_interval": 1, **_named("freeze_text_layers freeze_vision_layers", False)},
    "led": {"attention_window": 4},
    "fsmt": _named("src_vocab_size tgt_vocab_size", 99),
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moonshine_streaming_encoder": {"sliding_windows": [[16, 4]] * 2},
    "mimi": {
        **_named("upsample_groups codebook_dim vector_quantization_hidden_dimension", 32),
        "num_filters": 4,
        "num_quantizers": 2,
    },
    **_named(
        "vibevoice_acoustic_tokenizer_encoder vibevoice_acoustic_tokenizer", {"num_filters": 4, "depths": [1] * 7}
    ),
    **_named(
        "zamba zamba2",
        {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, **_named("n_mamba_heads", 8)},
    ),
    "mllama_vision_model": {"attention_heads": 4, "intermediate_layers_indices": [0], "vision_output_dim": 64},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "sam_vision_model": {"global_attn_indexes": [1], "output_channels": 32},
    "xlstm": {"head_dim": 8, "num_heads": 4, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    **_named(
        "chameleon_vqgan emu3_vqgan janus_vqgan",
        {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1},
    ),
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "num_res_blocks": 1},
    "emu3": {"vocabulary_map": {"<image>": 98, "<|extra_200|>": 97, "<|visual token 000001|>": 96}},
    "kyutai_speech_to_text": {"codebook_vocab_size": 99, "num_codebooks": 2, "audio_pad_token_id": 297},
    "blt": {"encoder_hash_byte_group_vocab": 40, "encoder_hash_byte_group_nb_functions": 1},
    **_named("blt_local_encoder blt_local_decoder", {"hidden_size_global": 32}),
    "hunyuan_vl_vision": {"max_image_size": 64, "text_hidden_size": 32},
    "got_ocr2_vision": {"global_attn_indexes": [1], "output_channels": 32},
    **_named(
        "deepseek_ocr2_sam_vision_model unlimited_ocr_sam_vision_model",
        {"global_attn_indexes": [1], "output_channels": 32, "downsample_channels": [32, 32]},
    ),
    **_named("qwen2_5_omni_thinker qwen3_omni_moe_thinker", {"vision_start_token_id": 95, "audio_start_token_id": 94}),
    "florence_vision": {
        "embed_dim": [16] * 4,
        **_named("num_heads num_groups", [2] * 4),
        "depths": [1] * 4,
        "window_size": 4,
    },
    **_named("seamless_m4t seamless_m4t_v2", {"feature_projection_input_dim": 8, "speech_encoder_layers": 2}),
    **_named("hubert wav2vec2 data2vec-audio speecht5 omniasr_encoder omniasr_audio_encoder", {"conv_dim": [32] * 7}),
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "qwen2_5_omni_text": {"rope_parameters": SECTIONS},
    **_named("qwen3_omni_moe_text qwen3_omni_moe_talker_text", {"rope_parameters": SECTIONS}),
    "chameleon": {"vocabulary_map": {"<image>": 98, "IMGIMGBSZ": 97}},
    **_named("qwen2_5_vl_vision exaone4_5_vision qwen2_5_omni_vision_encoder", {"window_size": 32}),
    **_named("llava_next llava_next_video llava_onevision", {"image_grid_pinpoints": [[32, 32]]}),
    "video_llava": {"vision_feature_layer": -1},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    **_named("gemma3 shieldgemma2", {"mm_tokens_per_image": 4}),
    **_named(
        "hunyuan_vl_text paddleocr_vl_text ernie4_5_vl_moe_text cosmos3_edge_text hy_v4_vl_text",
        {"rope_parameters": SECTIONS},
    ),
    "glm5_next_text": {"qk_rope_head_dim": 0},
    **_named("inkling2_text inkling2_loop_text", {"unpadded_vocab_size": 99}),
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "topk_group": 1,
        "n_group": 1,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    "ctrl": {"dff": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2},
    "granite4_vision": {
        "image_grid_pinpoints": [[32, 32]],
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [1, 2, 3, 4],
        "vision_config": {"model_type": "clip_vision_model", "hidden_size": 256, "num_hidden_layers": 2, **PICTURE},
        "downsample_rate": "1/2",
    },
    "granite4_vision_text": {"num_hidden_layers": 5},
    "gemma4_vision": {"num_key_value_heads": 4},
    **_named(
        "gemma4 diffusion_gemma",
        {
            "vision_config": {
                "model_type": "gemma4_vision",
                **_named("hidden_size", 32),
                **PICTURE,
                **_named("num_hidden_layers num_key_value_heads", 2),
                **_named("head_dim position_embedding_size", 8),
            }
        },
    ),
    "gemma3n_audio": {"conf_num_hidden_layers": 2, "sscp_conv_channel_size": [16, 8]},
    "dots3_note_vision_encoder": _named("adapter_in_dim adapter_out_dim", 32),
    "dots3_note_audio_encoder": {"conv_output_size": 512, **_named("adapter_input_size adapter_out_dim", 32)},
    "inkling2_vision": {"text_hidden_size": 32, "projection_hidden_dim": 64},
    "nemotron_h_omni": {"projector_hidden_size": 64, "vision_hidden_size": 32},
    **_named("muse_spark muse_glimmer", {"projector_hidden_size": 64, "out_hidden_size": 128}),
    "muse_spark_audio": {"depths": [1] * 4, "hidden_sizes": [16] * 4, "num_hidden_layers": 4},
    "nemotron3_diarization": {"head_config": _named("audio_hidden_size hidden_size", 32)},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 98},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2], "text_hidden_size": 32},
    "molmo2_vision": {"image_size": [32, 32]},
    "dia_decoder": {
        "cross_hidden_size": 32,
        "cross_head_dim": 8,
        **_named("cross_num_attention_heads cross_num_key_value_heads", 4),
    },
    "pp_formulanet_vision": {
        "global_attn_indexes": [1],
        **_named("decoder_hidden_size output_channels", 32),
        **_named("post_conv_in_channels post_conv_mid_channels post_conv_out_channels", 32),
    },
    "phi4_multimodal_vision": {"crop_size": 32},
    "phi4_multimodal_audio": {
        **_named("num_blocks time_reduction", 2),
        **_named("depthwise_separable_out_channel ext_pw_out_channel nemo_conv_channels", 32),
        "nemo_final_size": 40,
    },
    "inkling_vision": {"n_layers": 4},
    "gemma3n_vision": {"architecture": "test_efficientnet", "hidden_size": 256},
    "gemma3n": {"vision_soft_tokens_per_image": 1},
    "fast_vlm": {
        "vision_config": {"model_type": "timm_wrapper", "architecture": "test_efficientnet", "hidden_size": 256}
    },
    "perception_lm": {
        "vision_config": {"model_type": "timm_wrapper", "architecture": "test_vit", "model_args": {"embed_dim": 64}}
    },
    "radio": {"max_img_size": 64, "video_temporal_patch_size": 2},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **_named("qwen2_vl_text qwen2_5_vl_text", {"rope_parameters": SECTIONS}),
    **_named("glm4v_text glm4v_moe_text glm_image_text glm_ocr_text", {"rope_parameters": {**SECTIONS, **WHOLE_ROPE}}),
    "cohere_compass_text": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {"full_attention": ROPE},
    },
    "muse_spark_text": {
        **_named("moe_intermediate_size moe_hidden_size", 32),
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_rope_theta": [500000.0, 0],
        "mlp_layer_types": ["sparse", "sparse"],
    },
    "neomme": {
        "rope_parameters": {
            "sliding_attention": {**ROPE, **WHOLE_ROPE},
            "full_attention": {**ROPE, "rope_theta": 1e6, **WHOLE_ROPE},
        },
        "per_layer_config": {},
    },
    "dots3_note_text": {"per_layer_config": {}, "mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "esmc": {"num_key_value_heads": 4},
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        **_named("indexer_n_heads indexer_budget", 4),
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
    },
    "yolos": {"image_size": [32, 48]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mistral4": {"head_dim": 16},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention"], "moe_shared_expert_intermediate_size": 32},
    "nllb-moe": {"num_experts": 4, **_named("encoder_sparse_step decoder_sparse_step", 2)},
    "switch_transformers": {
        **_named("num_sparse_encoder_layers num_sparse_decoder_layers", 1),
        **_named("num_experts expert_capacity", 4),
    },
    "roc_bert": {"pronunciation_vocab_size": 99, "shape_vocab_size": 99},
    "markuplm": {"max_depth": 4, **_named("tag_pad_id subs_pad_id", 63)},
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 16},
}
LATENT: dict[str, Any] = {"num_key_value_heads": 4} | {
    **_named("qk_rope_head_dim qk_nope_head_dim v_head_dim head_dim", 8),
    **_named("kv_lora_rank q_lora_rank", 16),
}
"""Sizes of latent attention, which depend on each other."""
FEATURES: dict[str, tuple[dict[str, Any], ...]] = {
    "beit": ({"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}),
    "bloom": ({"slow_but_exact": True},),
    "cohere": ({"use_qk_norm": True},),
    "deberta-v2": ({"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, {"legacy": False}),
    "falcon": (
        {"alibi": True, "multi_query": False, "num_kv_heads": 4},
        {"alibi": True},
        {"alibi": True, "new_decoder_architecture": True},
        {"new_decoder_architecture": True, "bias": True},
        {"parallel_attn": False},
    ),
    "gemma3n_text": ({"activation_sparsity_pattern": [0.9, 0.0]},),
    "gpt_bigcode": ({"multi_query": False},),
    "gpt_neox": ({"use_parallel_residual": False},),
    "llama": ({"attention_bias": True, "mlp_bias": True},),
    "persimmon": ({"qk_layernorm": False},),
    "phi": ({"qk_layernorm": True},),
    "stablelm": ({"qk_layernorm": True}, {"use_parallel_residual": True, "use_qkv_bias": True}),
}
"""Options beside a family's defaults: each is tried by itself."""
SINGLE = {"inkling2_loop_text", "inkling2_text", "muse_spark_text", "xglm", "inkling2", "inkling2_loop", "muse_spark"}
SINGLE |= {"fsmt"}  # its masks are the least number of float64, in float32
"""Families that cannot compute in float64."""
PARTS = {
    "llama4": "see `llama4_text`",
    **dict.fromkeys(("muse_glimmer", "muse_spark", "phi4_multimodal"), "several models in one, found in the structure"),
    "clip": "see `clip_text_model` and `clip_vision_model`",
    **dict.fromkeys(("diffusion_gemma_text", "voxtral_realtime_text"), "no model class of its own"),
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_5_vl_vision"), "the tower of a multimodal model"),
    **dict.fromkeys(("siglip_text_model", "siglip2_text_model"), "the tower of a multimodal model"),
}
"""Configurations with a plan that are of no model by themselves."""
LARGEST = 20_000_000  # parameters of a model that is run
SHARDED = 0.65  # of the parameters, the most that a rank of two holds

CLASSES = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    auto.MODEL_MAPPING_NAMES,
)


@dataclass(frozen=True)
class Verdict:
    family: str
    model: str
    works: bool
    text: str
    share: float = 1.0
    """The part of the parameters that a rank holds."""
    beside: str = ""
    """What else ``parallelize`` takes the model with."""


def families() -> list[str]:
    """The ``model_type`` of every family with a plan of its own, or one of tpcore's."""
    ours = set(KINDS)
    return sorted(t for t in CONFIG_MAPPING_NAMES if t not in PARTS and (t in ours or _has_plan(t)))


def _has_plan(model_type: str) -> bool:
    """Of its layers: some have one for the table of tokens alone."""
    plan = getattr(CONFIG_MAPPING[model_type], "base_model_tp_plan", None) or {}
    return set(plan.values()) - {"embedding_rowwise"} != set()


def _has(config: Any, name: str) -> bool:
    """Whether a size can be set: one that every layer has of its own cannot be read of the whole."""
    try:
        return hasattr(config, name)
    except Exception:  # noqa: BLE001  an error that is no AttributeError
        return False


def config_of(model_type: str, kind: Any = None, **options: Any) -> Any:
    """A tiny configuration with a layer of experts where there are some, and with ``options``. ``kind``: the class, for
    one whose parts are tiny too."""
    parts: dict[str, Any] = {}
    sizes, optional = (
        (SIZES, OPTIONAL) if kind is None else (SIZES | OF_PARTS, OPTIONAL | OF_PARTS.keys() | {"sliding_window"})
    )
    kind, default = kind or CONFIG_MAPPING[model_type], (kind or CONFIG_MAPPING[model_type])()
    if sizes is not SIZES:
        inner = {name: getattr(default, name, None) for name in getattr(kind, "sub_configs", None) or ()}
        parts = {n: config_of(part.model_type, type(part)) for n, part in inner.items() if hasattr(part, "sub_configs")}
    chosen = {
        name: value
        for name, value in sizes.items()
        if _has(default, name)
        and not isinstance(getattr(default, name), list | tuple | dict)
        and (getattr(default, name) is not None or name in optional)
    }
    for name, other in (getattr(kind, "attribute_map", None) or {}).items():
        if name in chosen and other in chosen and name != other:
            chosen.pop(name)
    types = getattr(default, "layer_types", None)
    if types:
        name = (getattr(kind, "attribute_map", None) or {}).get("layer_types", "layer_types")
        chosen[name] = [types[0], list(dict.fromkeys(types))[-1]]
    if model_type in ("t5", "mt5", "umt5", "longt5", "switch_transformers"):
        chosen["decoder_start_token_id"] = 0
    if hasattr(default, "qk_rope_head_dim"):
        latent = {name for name in LATENT if _has(default, name) and getattr(default, name) is not None}
        chosen |= {name: size for name, size in LATENT.items() if name in latent}
    if getattr(default, "mlp_layer_types", None):
        chosen["mlp_layer_types"] = ["dense", "sparse"]
    chosen |= parts | copy.deepcopy(SPECIAL.get(model_type, {})) | options
    try:
        config = kind(**chosen)
    except Exception:  # noqa: BLE001  a family whose sizes depend on each other: each that can be set by itself
        config = kind()
        for name, value in chosen.items():
            with suppress(Exception):
                setattr(config, name, value)
    if getattr(config, "vocab_size", 99) is None:
        config.vocab_size = 99
    config._experts_implementation = "eager"  # the default kernel takes no float64
    return config


def class_of(model_type: str) -> type[nn.Module] | None:
    for names in CLASSES:
        name = names.get(model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    return None


def batch_of(model: Any) -> dict[str, Tensor]:
    """Something that the model takes, in float64 where it is no text."""
    made, config = torch.Generator().manual_seed(1), model.config

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    if config.model_type.startswith("siglip2") and model.main_input_name == "pixel_values":
        shapes = torch.tensor([[4, 4]] * 3)
        return {"pixel_values": noise(3, 16, 192), "pixel_attention_mask": torch.ones(3, 16), "spatial_shapes": shapes}
    if model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        return {"pixel_values": noise(2, *frames, config.num_channels, size, size)}
    if model.main_input_name == "input_values":
        spectrogram = config.model_type.startswith("audio-")
        return {"input_values": noise(3, config.max_length, config.num_mel_bins) if spectrogram else noise(3, 1600)}
    vocab = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    ids = torch.randint(3, vocab, (3, 8), generator=made)
    if model.main_input_name == "input_features":
        features = noise(2, 24, 8) if config.model_type == "speech_to_text" else noise(2, 8, 24)
        return {"input_features": features, "decoder_input_ids": ids[:2]}
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    if model.get_output_embeddings() is not None:
        batch["labels"] = ids.masked_fill(mask == 0, -100)
    elif config.is_encoder_decoder:
        batch["decoder_input_ids"] = ids
    if config.model_type == "xmod":
        batch["lang_ids"] = torch.zeros(3, dtype=torch.long)
    return batch


def made(kind: type[nn.Module], config: Any) -> Any:
    """A model whose every parameter matters: none is zero, and no norm is one."""
    torch.manual_seed(0)
    model = kind(config).float() if config.model_type in SINGLE else kind(config).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def step(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(loss in training, output in evaluation); gradients in the parameters."""
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    torch.manual_seed(1)  # what a model draws is drawn by its copies too
    model.train()
    output = model(**batch, **options)
    loss = getattr(output, "loss", None)
    if loss is None or getattr(output, "logits", None) is not None:  # a term of one's own reads all logits
        loss = _some_loss(_first(output)) + (0 if loss is None else loss)
    loss.backward()
    model.eval()
    with torch.no_grad():
        return loss.detach(), _first(model(**batch, **options))


def _first(output: Any) -> Tensor:
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def _some_loss(y: Tensor) -> Tensor:
    y = y.clamp(-1e6, 1e6)  # some mask logits with the least number that there is
    return (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype, device=y.device)).square().mean()


def distance(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    if got.shape != want.shape or not torch.isfinite(want).all():
        return float("inf")
    return float((got - want).abs().max() / (want.abs().max() + 1e-3)) if want.numel() else 0.0


class _Wide:
    """torch, in which transformers' modules find float64 where they ask for float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def widen(monkeypatch: Any, but: str = "of none") -> None:
    """Let the norms, routers, rotary positions and losses of the modules that are imported compute in float64. ``but``:
    not of those with this in their names."""
    narrow = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda t: t if t.dtype == torch.float64 else narrow(t))
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.") and but not in name and vars(module).get("torch") is torch:
            monkeypatch.setattr(module, "torch", _Wide())


@dataclass(frozen=True, eq=False)
class Whole:
    """A model, untouched, and what one step of a copy of it gives."""

    model: Any
    batch: dict[str, Tensor]
    want: tuple[Tensor, Tensor]
    gradients: dict[str, Tensor | None]

    @classmethod
    def of(cls, kind: type[nn.Module], config: Any, batch: dict[str, Tensor] | None = None) -> Whole:
        model = made(kind, config)
        batch = batch_of(model) if batch is None else batch
        stepped = copy.deepcopy(model)
        want = step(stepped, batch)
        return cls(model, batch, want, {name: p.grad for name, p in stepped.named_parameters()})

    def compared(self, degree: int, **options: Any) -> tuple[float, float] | str:
        """How far a cut model is from the whole one: loss, output and every gradient, on every rank. And the part
        of its parameters that a rank holds. Or why it is refused."""
        size = sum(p.numel() for p in self.model.parameters())

        def rank(ctx: tpcore.ParallelContext) -> tuple[float, float] | str:
            try:
                model = tpcore.parallelize(copy.deepcopy(self.model), **options)
            except ValueError as e:
                return str(e)
            found = [distance(a, b) for a, b in zip(step(model, self.batch), self.want, strict=True)]
            for name, p in model.named_parameters():
                expected, place = self.gradients[name], sharding(p)
                if expected is None or p.grad is None:
                    found.append(0.0 if expected is p.grad else float("inf"))
                    continue
                if place is not None:
                    expected = place.layout.spec.shard(expected, ctx.coord("tp"), degree)
                found.append(distance(p.grad, expected))
            return max(found), sum(p.numel() for p in model.parameters()) / size

        ranks = run_ranks(Mesh({"tp": degree}), rank)
        if isinstance(ranks[0], str):
            return ranks[0]
        return max(found for found, _ in ranks), ranks[0][1]


_LAST: dict[str, Whole | None] = {}


def _whole(model_type: str, features: dict[str, Any]) -> Whole | None:
    """The family's model, kept for the degrees and options that follow each other; None if it is too large to run."""
    key = f"{model_type} {features}"
    if key not in _LAST:
        kind, config = class_of(model_type), config_of(model_type, **features)
        assert kind is not None
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(config).parameters())
        _LAST.clear()
        _LAST[key] = Whole.of(kind, config) if size <= LARGEST else None
    return _LAST[key]


def refusal(
    kind: type[nn.Module], config: Any, degree: int, axis: str = "tp", adapters: bool = False, **options: Any
) -> str | None:
    """Why ``parallelize`` refuses a model, asked of one without values, with ``adapters``; None if it does not."""

    def rank(ctx: tpcore.ParallelContext) -> str | None:
        with torch.device("meta"):
            model = kind(config)
        try:
            model = _with_adapters(model) if adapters else model
            tpcore.parallelize(model, **options)
        except (ValueError, NotImplementedError) as e:  # peft's question for a table that a model hides
            return str(e)
        return None

    return run_ranks(Mesh({"tp": 1} | {axis: degree}), rank)[0]


def _with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


BESIDE: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    "cp": {"axis": "cp"},
    "pp": {"axis": "pp", "num_microbatches": 2},
    "experts": {"expert_parallel": True},
    "LoRA": {"adapters": True},
}
"""By the word of the page an option of ``refusal``."""


def beside(kind: Any, config: Any) -> str:
    """The words for which ``parallelize`` takes a model, whether it generates, and from buffers of one length."""
    words = [word for word, options in BESIDE.items() if refusal(kind, copy.deepcopy(config), 2, **options) is None]
    if kind.can_generate():
        words.append("generate")
        with torch.device("meta"), suppress(ValueError):
            check_takes_cache(kind(copy.deepcopy(config)), 4)
            words.append("serve")
    return " ".join(words)


def row(model_type: str) -> Verdict:
    """A family's row of the page: with experts, where it has some, and with each of its options."""
    found = verdict(model_type)
    planned = any("experts" in name for name in CONFIG_MAPPING[model_type].base_model_tp_plan or {})
    if found.works and planned and not _has_experts(model_type):
        raise AssertionError(f"{model_type} has experts, and was tried without: give it some in SPECIAL")
    for options in FEATURES.get(model_type, ()):
        assert verdict(model_type, 2, options).works, options
    return described(found, class_of(model_type), config_of(model_type)) if found.works else found


def described(found: Verdict, kind: Any, config: Any) -> Verdict:
    """With what else ``parallelize`` takes the model, and with what stays whole where that is too much."""
    whole = stays_whole(kind, config) if round(found.share, 2) > SHARDED else ""
    return replace(found, text=whole, beside=beside(kind, config))


def stays_whole(kind: Any, config: Any) -> str:
    def rank(ctx: tpcore.ParallelContext) -> str:
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
        summary = summary_of(tpcore.parallelize(model), None).partition("; whole: ")[2].partition(";")[0]
        return f": {', '.join(f'`{name}`' for name in summary.split(', '))}" if summary else ""

    return run_ranks(Mesh({"tp": 2}), rank)[0]


def _has_experts(model_type: str) -> bool:
    kind = class_of(model_type)
    assert kind is not None
    with torch.device("meta"):
        return any(type(m).__name__.endswith("Experts") for m in kind(config_of(model_type)).modules())


def verdict(model_type: str, degree: int = 2, features: dict[str, Any] | None = None, **options: Any) -> Verdict:
    """What comes of a family. Raises where a model is cut and differs: that neither works nor is refused."""
    kind, config = class_of(model_type), config_of(model_type, **features or {})
    if kind is None:
        return Verdict(model_type, "-", False, "no model class of its own")
    outcome: Any = refusal(kind, config, degree, **options)
    if outcome is None and (whole := _whole(model_type, features or {})) is not None:
        outcome = whole.compared(degree, **options)
    if outcome is None:
        raise AssertionError(f"{model_type}: more than {LARGEST} parameters are too many to run; see SPECIAL")
    if isinstance(outcome, str):
        return Verdict(model_type, kind.__name__, False, outcome)
    # 1e-5: norms of transformers round to float32, whose step is 1e-7, and a few layers stand above them
    found, share = outcome
    if not found < (1e-4 if model_type in SINGLE else 1e-5):
        raise AssertionError(f"{model_type}: a cut {kind.__name__} differs from the whole by {found:.0e}")
    return Verdict(model_type, kind.__name__, True, "works", share)


PAGE = """# Families of transformers

{works} families of transformers {version} work and {refused} are refused: a `ValueError` before anything is changed. A
tiny model of each, with a layer of every kind that the family has and its optional features on, was sharded over two
ranks: its loss, its output and every gradient equal the whole model's
(`PYTHONPATH=tests python -m helpers.families --table`).

The figure is the part of the parameters that each of the two ranks holds. Above 65% a family is right, not sharded, and
what stays whole follows: most of it convolutions, poolers, tables of positions and of patches, which weigh more in tiny
models than in real ones, parameters read without a call, and what computes with all heads or features at once. Beside
tensor parallelism `parallelize` takes a model with what the column `also with` names, and refuses the rest by a
`ValueError`: `sp` is `sequence_parallel=True`, `cp` and `pp` axes of the mesh, `experts` is `expert_parallel=True`,
`LoRA` adapters of all linear layers, `generate` and `serve` say whether it generates, and from buffers of one length.

<div id="families-filter"></div>

LoRA adapters of every linear layer were compared too (`tests/extensions/hf/test_peft.py`), except in Falcon and
OpenAI GPT. Refused by name are peft's adapters of bare parameters: in `afmoe`, `beam`, `cohere2_moe`, `deepseek_v2`,
`deepseek_v3`, `deepseek_v32`, `dots1`, `ernie4_5_moe`, `exaone_moe`, `glm4_moe`, `glm4_moe_lite`, `glm_moe_dsa`,
`hunyuan_v1_moe`, `longcat_flash`, `mellum`, `qwen3_next`, `solar_open`."""
TITLES = {
    "Work": "By `model_type`, the name in `config.json`:",
    "Multimodal models and other heads": "A plan covers the models inside a model, under any head. Compared:",
    "Refused": "",
    "Parts of models": "No models by themselves:",
}


def short(text: str) -> str:
    """A refusal in the words of the page."""
    for style, words in (("moe_tp_experts", "experts"), ("mla_kv_a_proj", "latent attention")):
        if style in text:
            return f"{words} (`{style}`)"
    if "Parameter)" in text:
        return "a parameter outside of a layer is sharded"
    if "by its plan: " in text:
        return text.partition("by its plan: ")[2].partition(";")[0]
    return "no block is cut by its plan" if "no plan of its own" in text else text


TABLE = ["| type | of a rank | also with |", "| --- | --- | --- |"]


def table_row(found: Verdict) -> str:
    return f"| `{found.family}` | {found.share:.0%}{found.text} | {found.beside} |"


def page(rows: list[Verdict], classes: list[Verdict]) -> str:
    works = [table_row(r) for r in rows if r.works]
    refused = [f"- `{r.family}`: {short(r.text)}" for r in rows if not r.works]
    parts = [f"- `{name}`: {why}" for name, why in sorted(PARTS.items())]
    of_classes = [", ".join(f"`{r.model}` {r.share:.0%}" for r in classes) + "."]
    sections = zip(TITLES.items(), ([*TABLE, *works], of_classes, refused, parts), strict=True)
    head = PAGE.format(version=transformers.__version__, works=len(works), refused=len(refused))
    return head + "".join(
        "\n".join(["", f"## {title}", "", *([text, ""] if text else []), *lines, ""])
        for (title, text), lines in sections
    )


def on_the_page(title: str) -> dict[str, str]:
    """By name, the share or the reason that the page has under ``title``."""
    text = PAGE_FILE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"`(\S+)` (?:\| )?(\d+%)", text) or re.findall(r"^- `(\S+)`: (.+)$", text, re.M))


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from helpers.composed import CASES, composed

    rows = []
    for number, name in enumerate(families(), 1):
        rows.append(row(name))
        sys.stderr.write(f"{number} of {len(families())}: {name} {rows[-1].text[:60]}\n")
    rows = [v for v in rows if v.model != "-"]
    sys.stdout.write(page(rows, [composed(name) for name in CASES]))


if __name__ == "__main__":
    main()
