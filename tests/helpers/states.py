"""Tiny sizes of models whose layers pass a state from token to token, or see a few tokens before."""

from __future__ import annotations

from typing import Any

BOTH = ["linear_attention", "full_attention"]
DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "layer_types": BOTH,
}
KDA = {"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": BOTH}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 8}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, "linear_num_key_heads": 2},  # fewer than the ranks
    "olmo_hybrid": DELTA,
    "kimi_linear": KDA,
    "bailing_hybrid": KDA,
    "bamba": {**MAMBA, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {**MAMBA, "layer_types": BOTH},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 4,
        "chunk_size": 8,
        "num_hidden_layers": 2,
        "layers_block_type": ["linear_attention", "hybrid"],
        "num_mem_blocks": 1,
        "hybrid_layer_ids": [1],
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 4,
        "chunk_size": 8,
        "layer_types": BOTH,
        "layers_block_type": BOTH,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4, "chunk_size": 8},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "jamba": {
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "layer_types": BOTH,
    },
    "zamba": {
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {},
    "lfm3": {},
}
PLANS = {
    **{name: {"model.layers.*.feed_forward.w1": "colwise_gather_output"} for name in ("lfm2", "lfm3")},
    **{name: {"model.layers.*.feed_forward.gate_proj": "colwise_gather_output"} for name in ("bamba", "falcon_h1")},
    **{
        name: {"backbone.layers.*.mixer.out_proj": "rowwise_split_input"}
        for name in ("falcon_mamba", "mamba", "mamba2")
    },
    "zamba": {"model.layers.*.linear": "colwise_gather_output"},
    "zamba2": {"model.layers.*.mamba.out_proj": "rowwise_split_input"},
}
"""For families that have none."""
