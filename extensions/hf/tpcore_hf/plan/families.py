"""Plans for model families without a plan in transformers: one entry for each structure of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from tpcore.layout.shard import Block

from .rules import Rule

Rules = Mapping[str, Rule]
"""Rules by patterns of names, in which ``{a,b}`` stands for ``a`` and for ``b``."""


class Family(NamedTuple):
    """``kinds``: each ``model_type`` of the structure. ``columns``, ``rows``: patterns with spaces between them, of the
    styles "colwise" and "rowwise". ``more``: other rules, or a function where the configuration decides."""

    kinds: str
    columns: str = ""
    rows: str = ""
    more: Rules | Callable[[Any], Rules] = {}


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
        "h.*.self_attention": "heads_argument",  # alibi
        "layers.*.self_attn.{q,k}_layernorm": "replicated_with_grad_allreduce",  # Persimmon's, of each head's features
    }


def _latent(config: Any) -> Rules:
    """Latent attention, which plans of transformers leave whole, by its heads."""
    types = getattr(config, "layer_types", None) or ()
    full = [str(i) for i, kind in enumerate(types) if kind == "full_attention"]
    attention = f"layers.{{{','.join(full)}}}.self_attn." if "linear_attention" in types else "layers.*.self_attn."
    gate = ",g" if config.model_type == "bailing_hybrid" else ""
    return {
        f"{attention}{{q,q_b,kv_b{gate}}}_proj": "colwise",
        attention + "kv_a_proj_with_mqa": "mla_kv_a_proj",
        attention + "o_proj": "rowwise",
        "layers.*.self_attn.softmax_scaling": "local_params",
        "layers.*.self_attn.softmax_scaling.{scale,bias}": "colwise",
        "layers.*.self_attn.{indexer,q_a_proj}": "replicate",
        "rotary_emb": "replicated_with_grad_allreduce",  # Mistral Large 4 learns its angles
    }


def _deberta(config: Any) -> Rules:
    positions: Rules = {"encoder.layer.*.attention.self.pos_dropout": "replicate"}  # which all heads share
    # the head without a matrix of its own reads the table's
    return positions if config.legacy else {**positions, "embeddings.word_embeddings": "replicate"}


def _gemma3n(config: Any) -> Rules:
    """Layers that pass only the largest gates measure them by mean and deviation over all features."""
    sparse = [i for i, part in enumerate(config.activation_sparsity_pattern or ()) if part > 0]
    return {f"layers.{i}.mlp.{{gate,up,down}}_proj": "replicate" for i in sparse}


_T5_ATTENTION = "block.*.layer.*.{Self,EncDec,LocalSelf}Attention."
_T5_MLP = "block.*.layer.*.{DenseReluDense,mlp,mlp.experts.expert_*}."
_VISION = "{layers,encoder.layers,encoder.layer}.*."
_VISION_COLUMNS = _VISION + "{{self_attn,attention}.{q,k,v}_proj,mlp.fc1,feed_forward.intermediate_dense}"
_VISION_ROWS = _VISION + "{{self_attn,attention}.{out,o}_proj,mlp.fc2,feed_forward.output_dense}"
FAMILIES = (
    Family(
        "albert",
        "encoder.albert_layer_groups.*.albert_layers.*.{attention.{query,key,value},ffn}",
        "encoder.albert_layer_groups.*.albert_layers.*.{attention.dense,ffn_output}",
    ),
    Family(
        "bart bigbird_pegasus biogpt blenderbot blenderbot-small m2m_100 marian mbart mvp opt pegasus plbart "
        "speech_to_text whisper xglm",
        "layers.*.{{self_attn,encoder_attn,self_attn.self}.{q,k,v}_proj,fc1}",
        "layers.*.{{self_attn,encoder_attn,self_attn.self}.out_proj,fc2}",
    ),
    Family(
        "bert bert-generation camembert data2vec-text dpt electra ernie esm layoutlm markuplm megatron-bert rembert "
        "roberta roberta-prelayernorm roc_bert roformer splinter videomae visual_bert xlm-roberta xlm-roberta-xl "
        "xmod yolos",
        "encoder.layer.*.{{attention,crossattention}.{self,attention}.{query,key,value},intermediate.dense}",
        "encoder.layer.*.{attention.,crossattention.,}output.dense",
        {
            "encoder.layer.*.output.adapter_modules": "replicate",
            "embeddings.{pronunciation,shape}_embed": "embedding_rowwise",  # RoCBert's
        },
    ),
    # what plans of transformers leave out: norms of each head's features, and what sees whole values alone
    Family(
        "glm4_moe phi qwen3_vl_moe_text sarvam_moe",
        more={"layers.*.self_attn.{q,k}_{norm,layernorm}": "replicated_with_grad_allreduce"},
    ),
    Family("higgs_audio_v2", more={"embed_audio_tokens.embed_audio_tokens": "embedding_rowwise"}),
    Family("cohere", more={"layers.*.self_attn.{q,k}_norm": "parameter_heads"}),
    Family("deepseek_v2 glm4_moe_lite minicpm3", more={"layers.*.self_attn.q_a_proj": "replicate"}),
    Family("longcat_flash", more={"layers.*.self_attn.*.q_a_proj": "replicate"}),
    Family("inkling_text", more={"layers.*.mlp.{,gate.}global_scale": "replicate"}),
    # families with a plan in transformers for which these rules are better, down to Phi-3: their own gathers q|k|v and
    # both halves of a gated MLP. Apertus' activation has parameters, whose gradients are summed
    Family("apertus apertus1p5_text", more={"layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}),
    Family(
        "glm glm4 glm4v_text glm_image_text glm_ocr_text",
        rows="layers.*.mlp.down_proj",
        more={"layers.*.mlp.gate_up_proj": "packed_colwise"},
    ),
    Family(
        "phi3",
        rows="layers.*.{self_attn.o_proj,mlp.down_proj}",
        more={"layers.*.self_attn.qkv_proj": "qkv_colwise", "layers.*.mlp.gate_up_proj": "packed_colwise"},
    ),
    Family("axk1 bailing_hybrid deepseek_v3 kimi_linear mistral4 mistral_large4_text youtu", more=_latent),
    Family(
        "bloom falcon gpt_neox_japanese persimmon",
        "{h,layers}.*.mlp.dense_h_to_4h",
        "{h.*.self_attention,layers.*.self_attn,layers.*.attention}.dense {h,layers}.*.mlp.dense_4h_to_h",
        _bloom,
    ),
    Family(
        "deberta-v2",
        "encoder.layer.*.{attention.self.{,pos_}{query,key,value}_proj,intermediate.dense}",
        "encoder.layer.*.{attention.,}output.dense",
        _deberta,
    ),
    Family(
        "distilbert flaubert xlm",
        "{transformer.layer.*.attention,attentions.*,encoder_attn.*}.{q,k,v}_lin {transformer.layer.*.ffn,ffns.*}.lin1",
        "{transformer.layer.*.attention,attentions.*,encoder_attn.*}.out_lin {transformer.layer.*.ffn,ffns.*}.lin2",
    ),
    Family(
        "gpt2 openai-gpt",
        "h.*.{crossattention.q_attn,mlp.c_fc}",
        "h.*.{attn,crossattention,mlp}.c_proj",
        {"h.*.attn.c_attn": "qkv_colwise", "h.*.crossattention.c_attn": "packed_colwise"},
    ),
    # an indexer of tokens is whole on each rank, and gives numbers, through which no gradient passes
    Family(
        "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4 hy_v4_vl_text",
        more={"layers.*.self_attn.{indexer,q_a_proj}": "replicate"},
    ),
    # attention that reads values of all heads at once stays whole, beside experts and MLPs that do not
    Family("doge glm5_next_text neomme", more={"layers.*.self_attn": "replicate"}),
    # norms over the features of all heads, as in OLMo 2
    Family(
        "esmc",
        more={
            "layers.*.self_attn.{q,k,v}_proj": "colwise_gather_output",
            "layers.*.self_attn.o_proj": "rowwise_split_input",
        },
    ),
    Family("gemma3n_text", more=_gemma3n),
    Family(
        "gpt_bigcode",
        "h.*.mlp.c_fc",
        "h.*.{attn,mlp}.c_proj",
        lambda config: {"h.*.attn.c_attn": "qkv_colwise" if config.multi_query else "colwise"},
    ),
    Family(
        "gpt_oss openai_privacy_filter",
        "layers.*.{self_attn.{{q,k,v}_proj,sinks},mlp.experts.{gate_up_proj_bias,down_proj}}",
        "layers.*.self_attn.o_proj",
        {
            "layers.*.self_attn": "local_params",
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_rowwise",  # stored transposed
        },
    ),
    Family("gpt_neo", "h.*.{attn.attention.{q,k,v}_proj,mlp.c_fc}", "h.*.{attn.attention.out_proj,mlp.c_proj}"),
    Family("gptj", "h.*.{attn.{q,k,v}_proj,mlp.fc_in}", "h.*.{attn.out_proj,mlp.fc_out}"),
    Family(
        "hunyuan_v1_dense muse_spark_text stablelm",  # Muse Spark's experts have a norm of all features: whole
        "layers.*.{self_attn.{q,k,v,gate}_proj,mlp.{gate,up}_proj}",
        "layers.*.{self_attn.o_proj,mlp.down_proj}",
        {
            "layers.*.self_attn.{query,key}_layernorm": "replicated_with_grad_allreduce",
            "layers.*.self_attn.{q,k}_layernorm": "parameter_heads",  # StableLM's
        },
    ),
    Family(
        "modernbert modernbert-decoder",
        "layers.*.attn.{q,k,v}_proj",
        "layers.*.{attn,mlp}.Wo",
        {"layers.*.attn.Wqkv": "qkv_colwise", "layers.*.mlp.Wi": "packed_colwise"},
    ),
    Family(
        "mpnet",
        "encoder.layer.*.{attention.attn.{q,k,v},intermediate.dense}",
        "encoder.layer.*.{attention.attn.o,output.dense}",
        {"encoder.relative_attention_bias": "embedding_heads"},
    ),
    Family(
        "mpt",
        "blocks.*.ffn.up_proj",
        "blocks.*.{attn.out_proj,ffn.down_proj}",
        {"blocks.*.attn": "heads_argument", "blocks.*.attn.Wqkv": "qkv_colwise"},
    ),
    Family(
        "longt5 mt5 switch_transformers t5 umt5",
        _T5_ATTENTION + "{q,k,v} " + _T5_MLP + "{wi,wi_0,wi_1}",
        _T5_ATTENTION + "o " + _T5_MLP + "wo",
        {_T5_ATTENTION + "relative_attention_bias": "embedding_heads"},  # of each head, by distance
    ),
    Family(
        "nemotron_h",
        "layers.*.mixer.{{q,k,v}_proj,{,shared_experts.}up_proj}",
        "layers.*.mixer.{o_proj,{,shared_experts.}down_proj}",
    ),
    Family(
        "nllb-moe",
        "layers.*.{{self_attn,cross_attention}.{q,k,v}_proj,ffn.{,experts.expert_*.}fc1}",
        "layers.*.{{self_attn,cross_attention}.out_proj,ffn.{,experts.expert_*.}fc2}",
    ),
    Family(
        "zaya",  # its attention mixes all heads by convolutions
        rows="layers.*.mlp.experts.down_proj",
        more={
            "layers.*.self_attn": "replicate",
            "layers.*.mlp.experts": "moe_tp_experts",
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        },
    ),
    Family(
        "audio-spectrogram-transformer clip clip_text_model clip_vision_model data2vec-audio deit dinov2 "
        "dinov2_with_registers hubert ijepa siglip_vision_model siglip2_vision_model vit vit_mae vit_msn vivit "
        "wav2vec2 siglip_text_model siglip2_text_model",
        _VISION_COLUMNS,
        _VISION_ROWS,
    ),
    Family("beit", _VISION_COLUMNS, _VISION_ROWS, {"layers.*.attention": "heads_argument"}),
    Family(
        "qwen2_vl_vision qwen2_5_vl_vision",
        "blocks.*.mlp.{fc1,gate_proj,up_proj}",
        "blocks.*.{attn.proj,mlp.fc2,mlp.down_proj}",
        {"blocks.*.attn.qkv": "qkv_colwise"},
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
    rules = {**dict.fromkeys(family.columns.split(), "colwise"), **dict.fromkeys(family.rows.split(), "rowwise")}
    more = family.more(config) if callable(family.more) else family.more
    return {name: rule for pattern, rule in {**rules, **more}.items() for name in _expanded(pattern)}


def _expanded(pattern: str) -> Iterator[str]:
    """The names for which a pattern stands: its innermost braces first."""
    braces = re.search(r"{([^{}]*)}", pattern)
    if braces is None:
        yield pattern
        return
    for alternative in braces[1].split(","):
        yield from _expanded(pattern[: braces.start()] + alternative + pattern[braces.end() :])
