"""Rules that are found in the structure of a model: its attentions and MLPs by the sizes of their linear layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from torch import nn

from . import rules as plan
from .decisions import features, is_linear
from .heads import head_size
from .inputs import is_own
from .rules import Rule, general, rule_of

Linears = Mapping[str, nn.Module]
_COMPARED = """
afmoe apertus1p5 aria audioflamingo3 aya_vision bamba big_bird bitnet blip blip-2 blt canary chameleon
cohere2_vision cohere_asr cohere_compass cosmos3_edge cosmos3_omni cpmant ctrl dbrx deepseek_ocr2 deepseek_v4
deepseek_vl deepseek_vl_hybrid dia diffllama diffusion_gemma dory dots3_note dpt emu3 encoder-decoder
ernie4_5_vl_moe evolla exaone4_5 falcon_h1 falcon_mamba fast_vlm florence2 fsmt fun_asr_nano fuyu gemma3 gemma3n
gemma4 gemma4_unified git glm46v glm4v glm4v_moe glm5_next glm_ocr glmasr glmga got_ocr2 gpt-sw3 granite4_vision
granite_docling granite_speech granite_speech_plus granitemoehybrid higgs_audio_v2 hunyuan_vl hy_v4_vl
hyperclovax_vision_v2 idefics idefics2 idefics3 inkling2 inkling2_loop inkling_mm_model inkling_text
instructblip instructblipvideo internvl jamba janus jetmoe kimi_k25 kosmos-2 kosmos-2.5 kyutai_speech_to_text
layoutlm led lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llava llava_next llava_next_video llava_onevision
mamba mamba2 markuplm minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mistral_large4 mllama molmo2
moonshine moonshine_streaming moshi moss_transcribe_diarize muse_glimmer muse_spark musicflamingo
musicgen_decoder musicgen_melody_decoder nemo_speechlm nemotron_h_omni neomme omniasr ovis2 paddleocr_vl
paligemma pegasus_x perception_lm phi4_multimodal pi0 pix2struct pop2piano pp_chart2table pp_formulanet
prophetnet qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5 qwen3_5_moe qwen3_asr
qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text recurrent_gemma roc_bert rwkv seamless_m4t
seamless_m4t_v2 shieldgemma2 siglip2_vision_model siglip_vision_model smolvlm speech-encoder-decoder speecht5
step3p7 t5gemma t5gemma2 trocr udop ultrabert unlimited_ocr vibevoice vibevoice_asr video_llama_3 video_llava
vipllava vision-encoder-decoder visual_bert voxtral voxtral_realtime xlnet xlstm zamba zamba2 zaya
"""
COMPARED = frozenset(_COMPARED.split())
"""Each ``model_type`` for which this was compared with the whole, by a batch that most of these layers compute with."""
_WHOLE = {
    # a kernel on GPUs takes its weight, and no forward calls it there
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h"), (".out_proj",)),
    **dict.fromkeys(("falcon_mamba", "mamba"), (".x_proj", ".dt_proj", ".out_proj")),
    "jamba": (".dt_proj",),
    # of which the attention takes the width of all heads
    **dict.fromkeys(("blip-2", "instructblip", "instructblipvideo"), (".self_attn.qkv",)),
    # initial values by the place in the weight
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), (".vit_merger.linear_1", ".vit_merger.linear_2")),
    # which no step of training calls, or of which one calls a part
    "kyutai_speech_to_text": (".codec_model",),
    "emu3": (".vqmodel",),
    "vibevoice": (".semantic_tokenizer_encoder", ".audio_tower", ".diffusion_head"),
    "vibevoice_asr": (".acoustic_tokenizer_encoder", ".semantic_tokenizer_encoder"),
    "granite_docling": (".connector",),
    "nemo_speechlm": (".diarization_model", ".word_timestamp_encoder"),
}
"""By ``model_type`` the linear layers that the module around them needs whole, and modules of such: ends of names."""
BESIDE: Mapping[str, Mapping[str, Rule]] = {
    # tables, or a head, with a forward or parameters of their own
    "diffusion_gemma": {  # its decoder has the encoder's parameters
        **{f"model.decoder.layers.*.self_attn.{name}_proj": plan.COLUMN for name in "qkv"},
        **{f"model.decoder.layers.*.self_attn.{norm}": plan.SUMMED for norm in ("q_norm", "k_norm")},
        **{f"model.decoder.layers.*.mlp.{name}_proj": plan.COLUMN for name in ("gate", "up")},
        **dict.fromkeys((f"model.decoder.layers.*.{name}" for name in ("self_attn.o_proj", "mlp.down_proj")), plan.ROW),
        "model.decoder.layers.*.experts": plan.EXPERTS,
        "model.decoder.layers.*.experts.gate_up_proj": plan.PACKED_COLUMN,
        "model.decoder.layers.*.experts.down_proj": plan.ROW,
    },
    "dory": {"lm_head": plan.REPLICATE},
    "idefics": {"model.embed_tokens": plan.REPLICATE, "lm_head": plan.REPLICATE},
    "t5gemma2": dict.fromkeys(
        ("model.encoder.text_model.embed_tokens", "model.decoder.embed_tokens", "lm_head.out_proj"), plan.REPLICATE
    ),
    "pix2struct": {"decoder.layer.*.self_attention.attention.relative_attention_bias": plan.EMBEDDING_HEADS},
    "phi4_multimodal": {
        "model.embed_tokens_extend.audio_embed.encoder.relative_attention_bias_layer.bias_values": plan.EMBEDDING_HEADS,
        "model.embed_tokens_extend.audio_embed.encoder.embed": plan.REPLICATE,
    },
    "qwen3_omni_moe_thinker": {
        f"model.language_model.layers.*.self_attn.{norm}": plan.SUMMED for norm in ("q_norm", "k_norm")
    },
}
"""By ``model_type`` the rules of what is no linear layer."""
_ALONE = """
big_bird blip deepseek_v4 falcon_mamba fsmt inkling2 inkling2_loop inkling_text kimi_k25 led mamba mamba2 moonshine
moonshine_streaming muse_spark pegasus_x prophetnet rwkv seamless_m4t seamless_m4t_v2 speecht5 trocr xlstm zaya
"""
_BY_THEMSELVES = frozenset(_ALONE.split())
"""Types whose attention reads the width of all heads elsewhere, or that have none: each layer gives whole values."""
_LEAST = 1 / 200
"""The part of a model's parameters from which a layer that nothing is known of is sharded."""


def found(model: nn.Module, known: Mapping[str, Rule], ends: Collection[nn.Module | None] = ()) -> dict[str, Rule]:
    """A rule for each linear layer outside of what ``known`` shards or leaves whole, and of ``ends``, the vocabulary's.
    The last layer of an attention and of an MLP sums, the others before it are divided by heads and features; a large
    layer around which the structure is another is divided by itself, and gives whole values."""
    rules: dict[str, Rule] = {}
    modules = dict(model.named_modules())
    ruled = {name for name in (*modules, *dict(model.named_parameters())) if rule_of(name, known) is not None}
    inside = {name.rpartition(".")[0] for name in ruled} | ruled
    whole = tuple(f"{name}." for name in ruled if rule_of(name, known) in (plan.REPLICATE, plan.EXPERTS))
    closed = (*whole, *(f"{name}." for name in inside if name in modules and head_size(modules[name])))
    users = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    kinds = {getattr(getattr(m, "config", None), "model_type", "") for m in modules.values()}
    read = tuple(end for kind in kinds for end in _WHOLE.get(kind, ()))
    linear = [name for name, m in modules.items() if is_linear(m) and m not in ends and name not in ruled]
    kept = {general(model, name) for name in linear if not _is_called(name, modules, read)}
    free = {
        name
        for name in linear
        if not name.startswith(whole) and general(model, name) not in kept
        if all(users[id(p)] == 1 for p in modules[name].parameters(recurse=False))
    }
    structured = getattr(getattr(model, "config", None), "model_type", None) not in _BY_THEMSELVES
    for name, block in reversed(modules.items()) if structured else ():  # the innermost first
        if isinstance(block, nn.ModuleList) or is_linear(block) or name in inside or name.startswith(closed):
            continue
        linears = {child: m for child, m in _linears(name, block) if child in free}
        styles = _attention(name, block, linears, modules) if head_size(block) else _mlp(name, block, linears)
        free -= styles.keys()
        rules |= {general(model, child): style for child, style in styles.items()}
    names, least = {name: general(model, name) for name in free}, _LEAST * sum(p.numel() for p in model.parameters())
    sizes = Counter[str]()
    for name, pattern in names.items():
        sizes[pattern] += features(modules[name])[0] * features(modules[name])[1]
    return rules | {pattern: _alone(modules[name]) for name, pattern in names.items() if sizes[pattern] >= least}


def _alone(module: nn.Module) -> Rule:
    """By the side that more degrees divide."""
    inputs, outputs = (size & -size for size in features(module))
    return plan.COLUMN_GATHERED if outputs >= min(inputs, 64) else plan.ROW_SPLIT


def _is_called(name: str, modules: Mapping[str, nn.Module], read: tuple[str, ...]) -> bool:
    """Whether a linear layer computes by its calls alone: with a forward of its own, or in a module of which nothing
    was compared, such as torch's attention, its weight may be read by others."""
    owner, module = modules[name.rpartition(".")[0]], modules[name]
    plain = type(module).forward is nn.Linear.forward or not isinstance(module, nn.Linear)
    known = isinstance(owner, nn.Sequential | nn.ModuleList) or is_own(owner)
    return plain and known and not any(f"{end}." in f".{name}." for end in read)


def _linears(name: str, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those of ``block``, and of the modules in it that are no attention and have one."""
    for child, module in block.named_children():
        if is_linear(module):
            yield f"{name}.{child}".lstrip("."), module
        elif not isinstance(module, nn.ModuleList | nn.ModuleDict) and not head_size(module):
            inner = [(n, m) for n, m in module.named_children() if is_linear(m)]
            yield from ((f"{name}.{child}.{n}".lstrip("."), m) for n, m in inner if len(inner) == 1)


def _attention(name: str, block: nn.Module, linears: Linears, modules: Mapping[str, nn.Module]) -> dict[str, Rule]:
    """Queries, keys and values, side by side or in one, and the layer that reads the values of all heads."""
    size = head_size(block) or 1
    direct: dict[str, nn.Module] = {child: m for child, m in linears.items() if child.rpartition(".")[0] == name}
    outer = modules[name.rpartition(".")[0]]
    if len(direct) == 3 and not isinstance(outer, nn.ModuleList):  # the last layer may be in a module beside this one
        beside = [pair for pair in _linears(name.rpartition(".")[0], outer) if not pair[0].startswith(f"{name}.")]
        width = max(features(m)[1] for m in direct.values())
        if len(beside) == 1 and features(beside[0][1])[0] == width:
            direct[beside[0][0]] = beside[0][1]
    if len(direct) not in (2, 4) or len(direct) != len(linears.keys() | direct.keys()):
        return {}
    *columns, row = direct
    width, wide = features(direct[row])
    if width % size or any(features(direct[child])[1] % size for child in columns):
        return {}
    styles: dict[str, Rule] = {**dict.fromkeys(columns, plan.COLUMN), row: plan.ROW}
    if len(columns) == 1:
        if features(direct[columns[0]])[1] <= width:
            return {}
        styles[columns[0]] = plan.QKV_COLUMN
    for child, part in block.named_children():
        shapes = {tuple(p.shape) for p in part.parameters()}
        if f"{name}.{child}" in direct or not shapes or (shapes <= {(wide,)} and wide != width):
            continue
        if shapes != {(size,)}:
            return {}
        styles[f"{name}.{child}"] = plan.SUMMED
    return {} if any(True for _ in block.parameters(recurse=False)) else styles


def _mlp(name: str, block: nn.Module, linears: Linears) -> dict[str, Rule]:
    """Layers to the inner features, or one to both halves of a gated layer's, and the one back."""
    if len(linears) not in (2, 3):
        return {}
    *columns, row = linears
    width, wide = features(linears[row])
    shapes = {features(linears[child])[1] for child in columns}
    near = [m for child, m in block.named_modules() if f"{name}.{child}".lstrip(".") not in linears]
    others = {tuple(p.shape) for m in near for p in m.parameters(recurse=False)}
    alone = all(child.rpartition(".")[0] == name for child in linears)
    if (others and alone) or width == wide or (width,) in others:
        return {}
    if shapes == {width}:
        return {**dict.fromkeys(columns, plan.COLUMN), row: plan.ROW}
    if shapes == {2 * width} and len(columns) == 1:
        return {columns[0]: plan.PACKED_COLUMN, row: plan.ROW}
    return {}
