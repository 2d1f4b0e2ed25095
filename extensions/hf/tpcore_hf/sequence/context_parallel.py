"""Context parallelism of a transformers model: its tokens are dealt to the ranks of cp in every forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.layers.context_parallel import Way, attention, check_heads, checked_way
from tpcore.layers.tokens import TokenOrder, Visible
from tpcore.log import inform
from tpcore.runtime.context import ParallelContext, current
from tpcore.train.pipeline import PipelinedLayers

from ..experts.layers import ShardedExperts
from ..plan.inputs import classes, is_known, is_own
from ..shard.refusals import guard
from .batch import ATTENTION, DealtTokens
from .loss import SequenceLoss
from .rows import DealtRows, deal_inside, see_whole
from .sizes import AttentionSizes, mib
from .states import check_states, convolutions, pass_states, passes_state, states_masks

_CONTEXT = "_tpcore_context"
"""Where attention modules find their model's ``DealtTokens``."""
_FAMILIES = """
afmoe albert apertus arcee aria_text axk1 bailing_hybrid bamba beam bert biogpt camembert cohere cohere2 cohere2_moe
cohere_compass_text cwm data2vec-text deepseek_v2 deepseek_v3 distilbert dots1 electra ernie ernie4_5 ernie4_5_moe esm
esmc eurobert exaone4 exaone_moe falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax internlm3 iquestcoder jais2 jamba kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama longcat_flash mamba
mamba2 mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert modernbert-decoder
nanochat nemotron nemotron_h neomme olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe
qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next roberta roberta-prelayernorm roc_bert seed_oss smollm3
solar_open stablelm starcoder2 ultrabert vaultgemma xlm-roberta xlm-roberta-xl xmod youtu zamba zamba2
"""
FAMILIES = frozenset(_FAMILIES.split())
"""Model types whose loss and gradients were compared with the whole model's."""
SEEING = frozenset(["llava", "qwen2_5_vl", "qwen3_vl"])
"""Those with towers, of which the model of text inside deals the tokens, images among them."""
_ONE_DOCUMENT = """
afmoe bert biogpt camembert data2vec-text electra ernie gpt_oss granitemoehybrid opt roberta roberta-prelayernorm
roc_bert xlm-roberta xlm-roberta-xl
"""
"""Causal models whose masks, in transformers, are made without positions: those that begin again begin no document."""
_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
_STATES = ("Mamba", "SSM", "Rwkv", "RWKV", "DeltaNet", "LinearAttention", "Recurrent", "ShortConv")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "router_jitter_noise")


def _text(model: Any) -> Any:
    """The model whose tokens are dealt: ``model``, or the one inside that is given what its towers see."""
    inside = getattr(getattr(model, "model", None), "language_model", None)
    return model if inside is None or model.config.model_type not in SEEING else inside


def context_of(model: Any, ctx: ParallelContext, way: str | None) -> tuple[Comm, Callable[[int], Way]] | None:
    """Over which ranks, and how, the tokens of ``model`` are to be cut; None: not at all. ValueError for a model that
    would be wrong if each rank had some of the tokens."""
    checked = None if way == "auto" else checked_way(way or "gather", "auto")
    comm = ctx.comm(*ctx.mesh.present(("cp",)))
    if comm.size == 1:
        return None
    why = _reason(model)
    if why is not None:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) cannot have its tokens cut over cp={comm.size} ranks: "
            f"{why}"
        )
    tp, text = ctx.comm("tp").size, _text(model)
    if not _attentions(text):
        return comm, lambda tokens: "gather"  # none of the ways: each rank has tokens that follow each other
    if checked == "ulysses":
        check_heads(text.config.num_attention_heads // tp, comm.size)
    if checked is not None:
        return comm, lambda tokens: checked
    sizes, ways = AttentionSizes.of(text, comm.size, tp), dict[int, Way]()

    def chosen(tokens: int) -> Way:
        if tokens not in ways:
            ways[tokens], why = sizes.choose(tokens)
            if ctx.rank == 0:
                inform(why)
        return ways[tokens]

    return comm, chosen


def _reason(model: Any) -> str | None:
    text = _text(model)
    config, sees, kind = text.config, text is not model, model.config.model_type
    towers = [getattr(model.config, name) for name in model.config.sub_configs] if sees else [config]
    dropout = {name: max(getattr(part, name, 0) or 0 for part in towers) for name in _DROPOUTS}
    dropped = next((f"{name}={value}" for name, value in dropout.items() if value), None)
    known = any(map(passes_state, model.modules()))
    named = (type(m).__name__ for m in model.modules() if any(s in type(m).__name__ for s in _STATES))
    state = None if known else next(named, None)
    rope = re.search("'rope_type': '(dynamic|longrope)'", str(getattr(config, "rope_parameters", None)))
    biased = any("relative_attention_bias" in name for name, _ in model.named_modules())
    weights = convolutions(model)
    parts = {*text.modules(), model, model.get_output_embeddings()} - weights
    seen = {name: m for name, m in model.named_modules() if name != "mlm_loss_fct" and m in parts}
    foreign = next((name for name, m in seen.items() if not is_known(m)), "")
    scored, compared = type(model).__name__.endswith(_HEADS), ", ".join(sorted(FAMILIES))
    reasons = {
        "it puts what a tower sees, images for instance, among the tokens, and only "
        f"{', '.join(sorted(SEEING))} were compared so: its text model alone can": "text_config" in config.sub_configs,
        "it is an encoder with a decoder, whose cross attention sees another sequence": config.is_encoder_decoder,
        f"its {state} passes a state from token to token by functions of its own": state,
        "its attention adds a learned bias for each distance": biased,
        "its class is not transformers' own, and its forward would see one rank's tokens": not is_own(model),
        f"the class of {foreign} is not transformers' own, and its forward would see one rank's tokens": foreign,
        f"{dropped}: ranks would draw other numbers than one process; set it to 0": dropped,
        f"rotary positions of type {rope and rope[1]} depend on the longest sequence of a batch": rope,
        f"it is none of {', '.join(_HEADS)}, whose loss is of each token: "
        "a config.json says which in architectures": not (scored or sees),
        "its attention is not causal by its configuration": getattr(config, "is_causal", True) is False,
        f"its family was not compared with the whole model; compared are {compared}": config.model_type
        not in FAMILIES | ({f"{kind}_text"} if sees else set()),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface, over the tokens of all ranks of cp."""
    biased = options.get("position_bias") is not None
    if options.get("dropout") or biased:
        feature = f"dropout={options['dropout']}" if options.get("dropout") else "position_bias"
        raise ValueError(f"context parallelism has no attention with {feature}, which {type(module).__name__} asks for")
    context: DealtTokens = getattr(module, _CONTEXT)
    segments = None if attention_mask is None else attention_mask[:, 0, 0]
    causal = getattr(module, "is_causal", True) if options.get("is_causal") is None else options["is_causal"]
    visible = Visible(causal, options.get("sliding_window"), segments)
    length = query.shape[2] * context.comm.size
    way, order = context.way(length), context.order(length)
    scores = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    out = attention(way, query, key, value, visible, order, *scores)
    return out.transpose(1, 2).contiguous(), None


def _attentions(model: Any) -> list[Any]:
    named = [m for m in model.modules() if re.search("Attention|MLA$", type(m).__name__)]
    return [m for m in named if not passes_state(m)]


@contextmanager
def cut_context(model: Any, over: tuple[Comm, Callable[[int], Way]] | None) -> Iterator[None]:
    """Deal the tokens of every forward of ``model`` to the ranks of a Comm; inside, its layers are sharded besides.
    ``over`` is what ``context_of`` returns."""
    if over is None:
        yield
        return
    comm, way = over
    # before layers get forwards of tpcore's own, around that of transformers
    pass_states(model, comm, lambda tokens: TokenOrder(comm, way(tokens) == "ring"))
    yield
    _cut(model, comm, way)


def _cut(model: Any, comm: Comm, way: Callable[[int], Way]) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shifted = not type(model).__name__.endswith("ForMaskedLM")
    text = _text(model)
    attentions, states = _attentions(text), [m for m in model.modules() if passes_state(m)]
    causal = all(getattr(m, "is_causal", True) for m in attentions)
    routed = hasattr(model.config, "output_router_logits")
    packed = causal and text.config.model_type not in _ONE_DOCUMENT.split()
    context = DealtTokens(comm, way, shifted, causal, packed, _positions(text), routed)
    if states:
        check_states(states, comm)
        context.masks = partial(states_masks, attends=bool(attentions))
    context.grids = any(hasattr(m, "mrope_section") for m in model.modules())
    base = getattr(text.base_model, "decoder", text.base_model)  # which OPT's head calls
    context.inside, whole = (None, set()) if text is model else (text, _seeing(model))
    base.register_forward_pre_hook(context.enter, with_kwargs=True, prepend=True)
    if routed:
        base.register_forward_hook(context.leave)
    dealt = {*attentions, *states}
    around = [module for module in base.modules() if any(inner in dealt for inner in module.modules())]
    layers = [m for m in around if isinstance(m, nn.ModuleList | PipelinedLayers)]
    outside = {*base.modules()} - {*around, *(inner for blocks in layers for inner in blocks.modules())}
    for module in outside - whole:
        # ESM scales tokens by the share of their row that is masked
        see_whole(module, context, always=model.config.model_type == "esm" and module is base.embeddings)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    text.set_attn_implementation(ATTENTION)
    for module in dealt:
        object.__setattr__(module, _CONTEXT, context)
    for name, layer in model.named_modules():
        if isinstance(layer, ShardedExperts):
            layer.sequences = DealtRows(context, layer, model.get_submodule(name.rpartition(".")[0]))
    if shifted:
        model.loss_function = SequenceLoss(model.loss_function, comm)
    deal_inside(model, context)
    context.watched = {name: classes(m) for name, m in model.named_modules() if m not in outside | whole}
    context.check_unseen(model)
    guard(model)


def _seeing(model: Any) -> set[nn.Module]:
    """What has whole sequences in a ``model`` with towers."""
    text = _text(model)
    rest = {*model.modules()} - {*text.modules(), model, model.model, model.get_output_embeddings()}
    return rest | {text.get_input_embeddings()}


def _positions(model: Any) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The numbers that ``model`` gives the tokens of whole sequences: RoBERTa's kin and ESM with a table of positions
    count the ids that are no padding, OPT what its mask says."""
    embeddings, name = getattr(model.base_model, "embeddings", None), "create_position_ids_from_input_ids"
    of_ids = getattr(embeddings, name, None)
    if getattr(model.config, "position_embedding_type", None) == "absolute" and of_ids is None:
        of_ids = getattr(inspect.getmodule(type(embeddings)), name, None)

    def positions(tokens: Tensor, mask: Tensor | None) -> Tensor:
        if embeddings is not None and of_ids is not None:
            first = embeddings.padding_idx + 1
            if tokens.is_floating_point():
                return torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
            numbers: Tensor = of_ids(tokens, embeddings.padding_idx)
            return numbers
        if model.config.model_type == "opt" and mask is not None:
            return (mask.cumsum(1) * mask - 1).long()
        return torch.arange(tokens.shape[1], device=tokens.device)[None]

    return positions


def _context(model: nn.Module) -> DealtTokens | None:
    return next((vars(m)[_CONTEXT] for m in model.modules() if _CONTEXT in vars(m)), None)


def context_costs(model: Any, tokens: int) -> str | None:
    """What the attention to sequences of ``tokens`` without padding costs a rank, in words; None where there is none,
    or no tokens are dealt."""
    context, text = _context(model), _text(model)
    attentions = _attentions(text)
    if context is None or not attentions:
        return None
    sizes = AttentionSizes.of(text, context.comm.size, current().comm("tp").size)
    layers = [m for m in attentions if not any(child in attentions for child in m.children())]
    masked = context.causal is False or bool(getattr(text.config, "sliding_window", None))
    head = model.get_output_embeddings()
    outputs = 0 if head is None else head.weight.shape[0]
    logits = outputs * (tokens // context.comm.size) * sizes.itemsize
    return f"{sizes.costs(context.way(tokens), tokens, masked, len(layers))}; its logits are {mib(logits)}"


def shard_sequence(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """This rank's tokens of ``batch``, for ``model(**shard_sequence(batch, model))``, where a loader should not keep
    whole sequences; loss and gradients are those of ``model(**batch)``.

    ``batch``: tensors ``[batch, tokens]`` by the names of the model's arguments, memory-mapped for instance, of
    which this rank's tokens are read. Returns a dict of ``[batch, tokens / cp]``: labels are shifted before,
    ``position_ids`` made if missing, and ``attention_mask`` keeps padding and documents of all tokens. Without
    context parallelism it is the batch. ValueError for what the model would refuse.
    """
    context = _context(model)
    return dict(batch) if context is None else context.deal(model, batch)
