"""Plans for model families without a plan in transformers: one entry for each structure of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..layout.shard import Block
from .plan import Rule

Rules = Mapping[str, Rule]
"""Rules by patterns of names, in which ``{a,b}`` stands for ``a`` and for ``b``."""


class Family(NamedTuple):
    """``kinds``: each ``model_type`` of the structure. ``rules``: a function where the configuration decides."""

    kinds: str
    rules: Rules | Callable[[Any], Rules]


def _bloom(config: Any) -> Rules:
    """One layer has q, k and v of each head side by side; Falcon also q|k|v with one key head, or each key and
    value head next to its queries."""
    projection: Rule = "colwise"
    if config.model_type == "falcon" and config.new_decoder_architecture:
        heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        groups = config.num_kv_heads
        projection = [Block((heads + 2 * groups) * size, (heads // groups + 2) * size)]
    elif config.model_type == "falcon" and config.multi_query:
        projection = "qkv_colwise"
    return {
        "{h.*.self_attention,layers.*.self_attn,layers.*.attention}.query_key_value": projection,
        "{h.*.self_attention,layers.*.self_attn,layers.*.attention}.dense": "rowwise",
        "h.*.self_attention": "heads_argument",  # alibi
        "{h,layers}.*.mlp.dense_h_to_4h": "colwise",
        "{h,layers}.*.mlp.dense_4h_to_h": "rowwise",
    }


def _better(config: Any) -> Rules:
    """Families with a plan in transformers for which these rules are better: they shard each half of a gated MLP, and
    each of q|k|v by its heads, which the model's own plan gathers.

    Apertus' activation has parameters, whose gradients are summed. OLMo 2's q, k and v stay gathered, for their norms.
    """
    if config.model_type == "apertus":
        return {"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    gated = {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"}
    fused = {"layers.*.self_attn.qkv_proj": "qkv_colwise", "layers.*.self_attn.o_proj": "rowwise"}
    return {**gated, **(fused if config.model_type == "phi3" else {})}


def _latent(config: Any) -> Rules:
    """Latent attention, which plans of transformers leave whole, by its heads."""
    types = getattr(config, "layer_types", None) or ()
    full = [str(i) for i, kind in enumerate(types) if kind == "full_attention"]
    attention = f"layers.{{{','.join(full)}}}.self_attn." if "linear_attention" in types else "layers.*.self_attn."
    return {
        attention + "{q,q_b,kv_b}_proj": "colwise",
        attention + "kv_a_proj_with_mqa": "mla_kv_a_proj",
        attention + "o_proj": "rowwise",
        **({attention + "g_proj": "colwise"} if config.model_type == "bailing_hybrid" else {}),
        "layers.*.self_attn.softmax_scaling": "local_params",
        "layers.*.self_attn.softmax_scaling.{scale,bias}": "colwise",
        "layers.*.self_attn.indexer": "replicate",
    }


def _deberta(config: Any) -> Rules:
    return {
        "encoder.layer.*.attention.self.{,pos_}{query,key,value}_proj": "colwise",
        "encoder.layer.*.attention.self.pos_dropout": "replicate",  # of positions, which all heads share
        "encoder.layer.*.{attention.output,output}.dense": "rowwise",
        "encoder.layer.*.intermediate.dense": "colwise",
        # the head without a matrix of its own reads the table's
        **({} if config.legacy else {"embeddings.word_embeddings": "replicate"}),
    }


def _bigcode(config: Any) -> Rules:
    projection = "qkv_colwise" if config.multi_query else "colwise"
    return {"h.*.attn.c_attn": projection, "h.*.mlp.c_fc": "colwise", "h.*.{attn,mlp}.c_proj": "rowwise"}


def _vision(config: Any) -> Rules:
    return {
        "{layers,encoder.layers,encoder.layer}.*.{self_attn,attention}.{q,k,v}_proj": "colwise",
        "{layers,encoder.layers,encoder.layer}.*.{self_attn,attention}.{out,o}_proj": "rowwise",
        "{layers,encoder.layers,encoder.layer}.*.{mlp.fc1,feed_forward.intermediate_dense}": "colwise",
        "{layers,encoder.layers,encoder.layer}.*.{mlp.fc2,feed_forward.output_dense}": "rowwise",
        **({"layers.*.attention": "heads_argument"} if config.model_type == "beit" else {}),
    }


def _gemma3n(config: Any) -> Rules:
    """Layers that pass only the largest gates measure them by mean and deviation over all features."""
    sparse = [i for i, part in enumerate(config.activation_sparsity_pattern or ()) if part > 0]
    return {f"layers.{i}.mlp.{{gate,up,down}}_proj": "replicate" for i in sparse}


def _t5(config: Any) -> Rules:
    attention = "block.*.layer.*.{Self,EncDec,LocalSelf}Attention."
    dense = f"block.*.layer.*.{{DenseReluDense.,mlp.{{,{_modules(config)}}}}}"
    return {
        attention + "{q,k,v}": "colwise",
        attention + "o": "rowwise",
        # the bias of each head by distance is sharded as the heads are
        attention + "relative_attention_bias": "embedding_heads",
        dense + "{wi,wi_0,wi_1}": "colwise",
        dense + "wo": "rowwise",
    }


def _nllb(config: Any) -> Rules:
    attention, dense = "layers.*.{self_attn,cross_attention}.", f"layers.*.ffn.{{,{_modules(config)}}}"
    columns = dict.fromkeys((attention + "{q,k,v}_proj", dense + "fc1"), "colwise")
    return {**columns, **dict.fromkeys((attention + "out_proj", dense + "fc2"), "rowwise")}


def _modules(config: Any) -> str:
    """The names of experts that are modules of linear layers."""
    return ",".join(f"experts.expert_{i}." for i in range(getattr(config, "num_experts", 0)))


_ESMC = {  # norms over the features of all heads, as in OLMo 2
    "layers.*.self_attn.{q,k,v}_proj": "colwise_gather_output",
    "layers.*.self_attn.o_proj": "rowwise_split_input",
}
FAMILIES = (
    Family(
        "albert",
        {
            "encoder.albert_layer_groups.*.albert_layers.*.{attention.{query,key,value},ffn}": "colwise",
            "encoder.albert_layer_groups.*.albert_layers.*.{attention.dense,ffn_output}": "rowwise",
        },
    ),
    Family(
        "bart bigbird_pegasus biogpt blenderbot blenderbot-small m2m_100 marian mbart mvp opt pegasus plbart "
        "speech_to_text whisper xglm",
        {
            "layers.*.{self_attn,encoder_attn,self_attn.self}.{q,k,v}_proj": "colwise",
            "layers.*.{self_attn,encoder_attn,self_attn.self}.out_proj": "rowwise",
            "layers.*.fc1": "colwise",
            "layers.*.fc2": "rowwise",
        },
    ),
    Family(
        "bert bert-generation camembert data2vec-text dpt electra ernie esm layoutlm markuplm megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer splinter videomae visual_bert xlm-roberta xlm-roberta-xl "
        "xmod yolos",
        {
            "encoder.layer.*.{attention,crossattention}.{self,attention}.{query,key,value}": "colwise",
            "encoder.layer.*.{attention,crossattention}.output.dense": "rowwise",
            "encoder.layer.*.intermediate.dense": "colwise",
            "encoder.layer.*.output.dense": "rowwise",
            "encoder.layer.*.output.adapter_modules": "replicate",
        },
    ),
    Family("apertus glm glm4 glm4v_text glm_image_text glm_ocr_text phi3", _better),
    Family("axk1 bailing_hybrid deepseek_v3 kimi_linear mistral4 mistral_large4_text youtu", _latent),
    Family("bloom falcon gpt_neox_japanese persimmon", _bloom),
    Family("deberta-v2", _deberta),
    Family(
        "distilbert flaubert xlm",
        {
            "{transformer.layer.*.attention,attentions.*,encoder_attn.*}.{q,k,v}_lin": "colwise",
            "{transformer.layer.*.attention,attentions.*,encoder_attn.*}.out_lin": "rowwise",
            "{transformer.layer.*.ffn,ffns.*}.lin1": "colwise",
            "{transformer.layer.*.ffn,ffns.*}.lin2": "rowwise",
        },
    ),
    Family(
        "gpt2 openai-gpt",
        {
            "h.*.attn.c_attn": "qkv_colwise",
            "h.*.crossattention.q_attn": "colwise",
            "h.*.crossattention.c_attn": "packed_colwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.{attn,crossattention,mlp}.c_proj": "rowwise",
        },
    ),
    Family(
        # an indexer of tokens is whole on each rank, and gives numbers, through which no gradient passes
        "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4",
        {"layers.*.self_attn.{indexer,q_a_proj}": "replicate"},
    ),
    # attention that reads values of all heads at once stays whole, beside experts and MLPs that do not
    Family("doge glm5_next_text neomme", {"layers.*.self_attn": "replicate"}),
    Family("esmc", _ESMC),
    Family("gemma3n_text", _gemma3n),
    Family("gpt_bigcode", _bigcode),
    Family(
        "gpt_oss openai_privacy_filter",
        {
            "layers.*.self_attn": "local_params",
            "layers.*.self_attn.{{q,k,v}_proj,sinks}": "colwise",
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_rowwise",  # stored transposed
            "layers.*.mlp.experts.{gate_up_proj_bias,down_proj}": "colwise",
        },
    ),
    Family(
        "gpt_neo",
        {
            "h.*.{attn.attention.{q,k,v}_proj,mlp.c_fc}": "colwise",
            "h.*.{attn.attention.out_proj,mlp.c_proj}": "rowwise",
        },
    ),
    Family("gptj", {"h.*.{attn.{q,k,v}_proj,mlp.fc_in}": "colwise", "h.*.{attn.out_proj,mlp.fc_out}": "rowwise"}),
    Family(
        "hunyuan_v1_dense muse_spark_text stablelm",  # Muse Spark's experts have a norm of all features: whole
        {
            "layers.*.{self_attn.{q,k,v,gate}_proj,mlp.{gate,up}_proj}": "colwise",
            "layers.*.{self_attn.o_proj,mlp.down_proj}": "rowwise",
        },
    ),
    Family(
        "modernbert modernbert-decoder",
        {
            "layers.*.attn.Wqkv": "qkv_colwise",
            "layers.*.attn.{q,k,v}_proj": "colwise",
            "layers.*.mlp.Wi": "packed_colwise",
            "layers.*.{attn,mlp}.Wo": "rowwise",
        },
    ),
    Family(
        "mpnet",
        {
            "encoder.layer.*.{attention.attn.{q,k,v},intermediate.dense}": "colwise",
            "encoder.layer.*.{attention.attn.o,output.dense}": "rowwise",
            "encoder.relative_attention_bias": "embedding_heads",
        },
    ),
    Family(
        "mpt",
        {
            "blocks.*.attn": "heads_argument",
            "blocks.*.attn.Wqkv": "qkv_colwise",
            "blocks.*.ffn.up_proj": "colwise",
            "blocks.*.{attn.out_proj,ffn.down_proj}": "rowwise",
        },
    ),
    Family("longt5 mt5 switch_transformers t5 umt5", _t5),
    Family(
        "nemotron_h",
        {
            "layers.*.mixer.{{q,k,v}_proj,{,shared_experts.}up_proj}": "colwise",
            "layers.*.mixer.{o_proj,{,shared_experts.}down_proj}": "rowwise",
        },
    ),
    Family("nllb-moe", _nllb),
    Family(
        "zaya",  # its attention mixes all heads by convolutions
        {
            "layers.*.self_attn": "replicate",
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.experts.down_proj": "rowwise",
        },
    ),
    Family(
        "audio-spectrogram-transformer beit clip clip_text_model clip_vision_model data2vec-audio deit dinov2 "
        "dinov2_with_registers hubert ijepa siglip_vision_model siglip2_vision_model vit vit_mae vit_msn vivit "
        "wav2vec2 siglip_text_model siglip2_text_model",
        _vision,
    ),
    Family(
        "qwen2_vl_vision qwen2_5_vl_vision",
        {
            "blocks.*.attn.qkv": "qkv_colwise",
            "blocks.*.{attn.proj,mlp.fc2,mlp.down_proj}": "rowwise",
            "blocks.*.mlp.{fc1,gate_proj,up_proj}": "colwise",
        },
    ),
)
_BY_KIND = {kind: family for family in FAMILIES for kind in family.kinds.split()}
KINDS = frozenset(_BY_KIND)
"""Each ``model_type`` that has rules here."""


def rules_of(config: Any) -> dict[str, Rule]:
    """The rules of a family, with names of its base model or its stacks of layers; {} if it is unknown."""
    family = _BY_KIND.get(getattr(config, "model_type", ""))
    if family is None:
        return {}
    rules = family.rules(config) if callable(family.rules) else family.rules
    return {name: rule for pattern, rule in rules.items() for name in _expanded(pattern)}


def _expanded(pattern: str) -> Iterator[str]:
    """The names for which a pattern stands: its innermost braces first."""
    braces = re.search(r"{([^{}]*)}", pattern)
    if braces is None:
        yield pattern
        return
    for one in braces[1].split(","):
        yield from _expanded(pattern[: braces.start()] + one + pattern[braces.end() :])
