"""Context parallelism of a transformers model: its tokens are dealt to the ranks of cp in every forward.

Every rank passes the whole sequences. The model takes its part of them, its attention sees the keys of all ranks,
and the loss is that of the whole batch on every rank. For gradients cp ranks are therefore like dp ranks: a mean
over both is the gradient, which ``tpcore.reduce_gradients`` and ``optimizer_step`` take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..comm.comm import Comm
from ..layers.context_parallel import Way, attention, check_heads
from ..layers.tokens import Visible
from ..runtime.context import ParallelContext, current
from .dealt import ATTENTION, DealtTokens, SequenceLoss
from .guards import guard
from .ways import AttentionSizes, Automatic, checked_choice

_CONTEXT = "_tpcore_context"
"""Where attention modules find their model's ``DealtTokens``."""

_FAMILIES = """
albert apertus arcee bert cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3 distilbert dots1 electra ernie
ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt2
gpt_bigcode gpt_neox granite helium hunyuan_v1_dense hunyuan_v1_moe laguna llama mellum minimax_m2 ministral ministral3
mistral mixtral modernbert modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
"""
FAMILIES = frozenset(_FAMILIES.split())
"""Model types whose loss and gradients were compared with the whole model's."""
_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
_STATES = ("Mamba", "SSM", "Rwkv", "RWKV", "DeltaNet", "LinearAttention", "Recurrent", "ShortConv")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "router_jitter_noise")


def context_of(model: Any, ctx: ParallelContext, way: str | None) -> tuple[Comm, Callable[[int], Way]] | None:
    """Over which ranks, and how, the tokens of ``model`` are to be cut; None: not at all.

    ValueError for a model that would be wrong if each rank had some of the tokens.
    """
    checked, comm = checked_choice(way or "gather"), ctx.comm(*ctx.mesh.present(("cp",)))
    if comm.size == 1:
        return None
    why = _reason(model)
    if why is not None:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) cannot have its tokens cut over cp={comm.size} ranks: "
            f"{why}"
        )
    tp = ctx.comm("tp").size
    if checked is None:
        return comm, Automatic(AttentionSizes.of(model, comm.size, tp), speaks=ctx.rank == 0)
    if checked == "ulysses":
        check_heads(model.config.num_attention_heads // tp, comm.size)
    return comm, lambda tokens: checked


def _reason(model: Any) -> str | None:
    config = model.config
    dropout = {name: getattr(config, name, 0) or 0 for name in _DROPOUTS}
    dropped = next((f"{name}={value}" for name, value in dropout.items() if value), None)
    state = next((type(m).__name__ for m in model.modules() if any(s in type(m).__name__ for s in _STATES)), None)
    rope = re.search("'rope_type': '(dynamic|longrope)'", str(getattr(config, "rope_parameters", None)))
    reasons = {
        "it is an encoder with a decoder, whose cross attention sees another sequence": config.is_encoder_decoder,
        f"its {state} passes a state from token to token": state,
        "its attention adds a learned bias for each distance": any(
            "relative_attention_bias" in name for name, _ in model.named_modules()
        ),
        f"{dropped}: ranks would draw other numbers than one process; set it to 0": dropped,
        f"rotary positions of type {rope and rope[1]} depend on the longest sequence of a batch": rope,
        f"it is none of {', '.join(_HEADS)}, whose loss is of each token: a config.json says which in architectures": (
            not type(model).__name__.endswith(_HEADS)
        ),
        "its attention is not causal by its configuration": getattr(config, "is_causal", True) is False,
        f"its family was not compared with the whole model; compared are {', '.join(sorted(FAMILIES))}": (
            config.model_type not in FAMILIES
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, over the tokens of all ranks of cp."""
    unknown = [n for n in ("s_aux", "position_bias") if options.get(n) is not None]
    if dropout or unknown:
        what = f"dropout={dropout}" if dropout else ", ".join(unknown)
        raise ValueError(f"context parallelism has no attention with {what}, which {type(module).__name__} asks for")
    context: DealtTokens = getattr(module, _CONTEXT)
    segments = None if attention_mask is None else attention_mask[:, 0, 0]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = Visible(causal, sliding_window, segments)
    length = query.shape[2] * context.comm.size
    way, order = context.way(length), context.order(length)
    out = attention(way, query, key, value, visible, order, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def cut_context(model: Any, comm: Comm, way: Callable[[int], Way]) -> None:
    """Deal the tokens of every forward of ``model`` to the ranks of ``comm``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shifted = not type(model).__name__.endswith("ForMaskedLM")
    attentions = [m for m in model.modules() if "Attention" in type(m).__name__]
    causal = all(getattr(m, "is_causal", True) for m in attentions)
    routed = hasattr(model.config, "output_router_logits")
    context = DealtTokens(comm, way, shifted, causal, routed)
    model.base_model.register_forward_pre_hook(context.enter, with_kwargs=True, prepend=True)
    if routed:
        model.base_model.register_forward_hook(context.leave)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    for module in attentions:
        object.__setattr__(module, _CONTEXT, context)
    if shifted:
        model.loss_function = SequenceLoss(model.loss_function, context)
    model.register_forward_pre_hook(context.before, with_kwargs=True, prepend=True)
    model.register_forward_hook(context.after, with_kwargs=True)
    guard(model)


def _context(model: nn.Module) -> DealtTokens | None:
    return next((vars(m)[_CONTEXT] for m in model.modules() if _CONTEXT in vars(m)), None)


def context_costs(model: Any, tokens: int) -> str | None:
    """What sequences of ``tokens`` without padding cost a rank, in words; None if none are dealt."""
    context = _context(model)
    if context is None:
        return None
    sizes = AttentionSizes.of(model, context.comm.size, current().comm("tp").size)
    layers = [m for m in model.modules() if _CONTEXT in vars(m) and not any(_CONTEXT in vars(c) for c in m.children())]
    masked = context.causal is False or bool(getattr(model.config, "sliding_window", None))
    return sizes.costs(context.way(tokens), tokens, masked, len(layers))


def shard_sequence(batch: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """This rank's tokens of ``batch``, for ``model(**shard_sequence(batch, model))``, where a loader should not keep
    whole sequences; loss and gradients are those of ``model(**batch)``.

    ``batch``: tensors ``[batch, tokens]`` by the names of the model's arguments, memory-mapped for instance, of
    which this rank's tokens are read. Returns a dict of ``[batch, tokens / cp]``: labels are shifted before,
    ``position_ids`` made if missing, and ``attention_mask`` keeps padding and documents of all tokens. Without
    context parallelism it is the batch. ValueError for what the model would refuse.
    """
    context = _context(model)
    return dict(batch) if context is None else context.deal_once(model, batch)
