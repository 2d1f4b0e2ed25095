"""Context parallelism of a transformers model: its tokens are dealt to the ranks of cp in every forward."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.layers.context_parallel import LARGEST_MASK, Way, attention, check_heads, checked_way
from tpcore.layers.tokens import Visible
from tpcore.log import inform
from tpcore.runtime.context import ParallelContext, current
from tpcore.train.pipeline import PipelinedLayers

from ..experts.layers import ShardedExperts
from ..plan.heads import key_value_width
from ..plan.inputs import classes, is_known, is_own
from ..shard.refusals import guard
from .batch import ATTENTION, DealtTokens, SequenceLoss
from .rows import DealtRows, deal_inside, see_whole

_CONTEXT = "_tpcore_context"
"""Where attention modules find their model's ``DealtTokens``."""
_FAMILIES = """
afmoe albert apertus arcee aria_text axk1 beam bert biogpt camembert cohere cohere2 cohere2_moe cohere_compass_text
cwm data2vec-text deepseek_v2 deepseek_v3 distilbert dots1 electra ernie ernie4_5 ernie4_5_moe esm esmc eurobert
exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4
glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa
granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2
kolibri1 laguna llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral
modernbert modernbert-decoder nanochat nemotron neomme olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open stablelm starcoder2
ultrabert vaultgemma xlm-roberta xlm-roberta-xl xmod youtu
"""
FAMILIES = frozenset(_FAMILIES.split())
"""Model types whose loss and gradients were compared with the whole model's."""
_ONE_DOCUMENT = """
afmoe bert biogpt camembert data2vec-text electra ernie gpt_oss opt roberta roberta-prelayernorm roc_bert xlm-roberta
xlm-roberta-xl
"""
"""Causal models whose masks, in transformers, are made without positions: those that begin again begin no document."""
_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
_STATES = ("Mamba", "SSM", "Rwkv", "RWKV", "DeltaNet", "LinearAttention", "Recurrent", "ShortConv")
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "router_jitter_noise")


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
    tp = ctx.comm("tp").size
    if checked == "ulysses":
        check_heads(model.config.num_attention_heads // tp, comm.size)
    if checked is not None:
        return comm, lambda tokens: checked
    sizes, ways = AttentionSizes.of(model, comm.size, tp), dict[int, Way]()

    def chosen(tokens: int) -> Way:
        if tokens not in ways:
            ways[tokens], why = sizes.choose(tokens)
            if ctx.rank == 0:
                inform(why)
        return ways[tokens]

    return comm, chosen


def _reason(model: Any) -> str | None:
    config = model.config
    dropout = {name: getattr(config, name, 0) or 0 for name in _DROPOUTS}
    dropped = next((f"{name}={value}" for name, value in dropout.items() if value), None)
    state = next((type(m).__name__ for m in model.modules() if any(s in type(m).__name__ for s in _STATES)), None)
    rope = re.search("'rope_type': '(dynamic|longrope)'", str(getattr(config, "rope_parameters", None)))
    biased = any("relative_attention_bias" in name for name, _ in model.named_modules())
    foreign = next((n for n, m in model.named_modules() if not is_known(m) and n != "mlm_loss_fct"), "")
    scored, compared = type(model).__name__.endswith(_HEADS), ", ".join(sorted(FAMILIES))
    reasons = {
        "it is an encoder with a decoder, whose cross attention sees another sequence": config.is_encoder_decoder,
        f"its {state} passes a state from token to token": state,
        "its attention adds a learned bias for each distance": biased,
        "its class is not transformers' own, and its forward would see one rank's tokens": not is_own(model),
        f"the class of {foreign} is not transformers' own, and its forward would see one rank's tokens": foreign,
        f"{dropped}: ranks would draw other numbers than one process; set it to 0": dropped,
        f"rotary positions of type {rope and rope[1]} depend on the longest sequence of a batch": rope,
        f"it is none of {', '.join(_HEADS)}, whose loss is of each token: "
        "a config.json says which in architectures": not scored,
        "its attention is not causal by its configuration": getattr(config, "is_causal", True) is False,
        f"its family was not compared with the whole model; compared are {compared}": config.model_type not in FAMILIES,
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


def cut_context(model: Any, comm: Comm, way: Callable[[int], Way]) -> None:
    """Deal the tokens of every forward of ``model`` to the ranks of ``comm``."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shifted = not type(model).__name__.endswith("ForMaskedLM")
    attentions = [m for m in model.modules() if re.search("Attention|MLA$", type(m).__name__)]
    causal = all(getattr(m, "is_causal", True) for m in attentions)
    routed = hasattr(model.config, "output_router_logits")
    packed = causal and model.config.model_type not in _ONE_DOCUMENT.split()
    context = DealtTokens(comm, way, shifted, causal, packed, _positions(model), routed)
    base = getattr(model.base_model, "decoder", model.base_model)  # which OPT's head calls
    base.register_forward_pre_hook(context.enter, with_kwargs=True, prepend=True)
    if routed:
        base.register_forward_hook(context.leave)
    around = [module for module in base.modules() if any(inner in attentions for inner in module.modules())]
    layers = [m for m in around if isinstance(m, nn.ModuleList | PipelinedLayers)]
    outside = {*base.modules()} - {*around, *(inner for blocks in layers for inner in blocks.modules())}
    for module in outside:
        # ESM scales tokens by the share of their row that is masked
        see_whole(module, context, always=model.config.model_type == "esm" and module is base.embeddings)
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)
    for module in attentions:
        object.__setattr__(module, _CONTEXT, context)
    for name, layer in model.named_modules():
        if isinstance(layer, ShardedExperts):
            layer.sequences = DealtRows(context, layer, model.get_submodule(name.rpartition(".")[0]))
    if shifted:
        model.loss_function = SequenceLoss(model.loss_function, context)
    deal_inside(model, context)
    context.watched = {name: classes(m) for name, m in model.named_modules() if m not in outside}
    context.check_unseen(model)
    guard(model)


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
    """What sequences of ``tokens`` without padding cost a rank, in words; None if none are dealt."""
    context = _context(model)
    if context is None:
        return None
    sizes = AttentionSizes.of(model, context.comm.size, current().comm("tp").size)
    layers = [m for m in model.modules() if _CONTEXT in vars(m) and not any(_CONTEXT in vars(c) for c in m.children())]
    masked = context.causal is False or bool(getattr(model.config, "sliding_window", None))
    head = model.get_output_embeddings()
    outputs = 0 if head is None else head.weight.shape[0]
    logits = outputs * (tokens // context.comm.size) * sizes.itemsize
    return f"{sizes.costs(context.way(tokens), tokens, masked, len(layers))}; its logits are {_mib(logits)}"


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


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class AttentionSizes:
    """Of one rank of ``cp`` and ``tp``; counts are of bytes, for one sequence."""

    heads: int
    keys: int
    head_dim: int
    hidden: int
    itemsize: int
    cp: int
    tp: int

    @classmethod
    def of(cls, model: Any, cp: int, tp: int) -> AttentionSizes:
        config = model.config
        heads, hidden = config.num_attention_heads, config.hidden_size
        keys = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
        return cls(heads // tp, max(keys // tp, 1), key_value_width(config) // 2, hidden, model.dtype.itemsize, cp, tp)

    def sent(self, way: Way, tokens: int) -> int:
        """What a rank sends in forward and backward."""
        n, wide = self.cp, max(self.itemsize, 4)  # the ring's gradients travel as sums of many
        exchanged = self.heads if self.keys % n else self.keys
        heads = {
            "gather": 4 * (n - 1) * self.keys * self.itemsize,
            "ulysses": 4 * (n - 1) * (self.heads + exchanged) * self.itemsize // n,
            "ring": (4 * (n - 1) * self.itemsize + 2 * n * wide) * self.keys,
        }[way]
        return heads * self.head_dim * tokens // n

    def kept(self, way: Way, tokens: int, masked: bool = True) -> int:
        """What a rank keeps for backward: scaled_dot_product_attention keeps keys for each query head, and the mask
        unless that is large. Not ``masked``: tokens see all earlier ones, which takes no mask where a rank has all
        queries."""
        local = tokens // self.cp
        heads = {
            "gather": 2 * (local + tokens) * self.heads,
            "ulysses": 4 * local * self.heads,
            "ring": 2 * local * (self.heads + self.keys),
        }[way]
        pairs = self.pairs(way, tokens) if masked or (way == "gather" and self.cp > 1) else 0
        return (heads * self.head_dim + (pairs if pairs <= LARGEST_MASK else 0)) * self.itemsize

    def pairs(self, way: Way, tokens: int) -> int:
        """Of queries and keys, in the mask of an attention."""
        return {"gather": tokens // self.cp * tokens, "ulysses": tokens * tokens, "ring": 0}[way]

    def rest(self, tokens: int) -> int:
        """What the rest of a layer keeps, in 16 bits ``(10 + 24 / tp)`` bytes per token and hidden feature: Korthikanti
        et al. 2022, arXiv:2205.05198, equation 2."""
        return round((10 + 24 / self.tp) / 2 * self.hidden * self.itemsize) * (tokens // self.cp)

    @property
    def ways(self) -> list[Way]:
        return [w for w in get_args(Way) if w != "ulysses" or self.heads % self.cp == 0]

    def costs(self, way: Way, tokens: int, masked: bool, layers: int) -> str:
        """In words, of ``way`` and of the layers around it."""
        kept, rest = self.kept(way, tokens, masked), self.rest(tokens)
        others = [
            f"{w!r} would send {_mib(self.sent(w, tokens))} and keep {_mib(self.kept(w, tokens, masked))}"
            for w in self.ways
            if w != way
        ]
        return (
            f"{way!r} for {tokens} tokens over cp={self.cp}: for each sequence an attention sends "
            f"{_mib(self.sent(way, tokens))} and keeps {_mib(kept)} for backward, the rest of its layer keeps about "
            f"{_mib(rest)}; {layers} layers keep about {_mib(layers * (kept + rest))}; {', '.join(others)}"
        )

    def choose(self, tokens: int) -> tuple[Way, str]:
        """The way that sends the fewest bytes of those that keep no more than the rest of a layer; and why."""
        ways, limit = self.ways, self.rest(tokens)
        # a mask too large to keep counts, too: it takes time, for keys that are hidden, and again in backward
        most = {w: self.kept(w, tokens) + max(self.pairs(w, tokens) - LARGEST_MASK, 0) * self.itemsize for w in ways}
        fit = [w for w in ways if w == "ring" or most[w] <= limit]
        best = min(fit, key=lambda way: self.sent(way, tokens))
        costs = ", ".join(f"{w} {_mib(self.sent(w, tokens))} and {_mib(self.kept(w, tokens))}" for w in ways)
        return best, (
            f"context_parallel='auto' is {best!r} for {tokens} tokens over cp={self.cp}: an attention sends and keeps "
            f"for each sequence {costs}, and the rest of its layer keeps about {_mib(limit)}"
        )
