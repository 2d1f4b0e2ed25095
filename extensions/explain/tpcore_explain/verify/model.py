"""``tpcore verify --model``: a tiny copy of a model, sharded, beside the whole. The copy is of the model's own
configuration. What decides how it is sharded stays: options, numbers and sizes of heads, experts and groups, a layer of
each kind. Widths and the vocabulary are less."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn

from tpcore.comm.comm import Comm
from tpcore.errors import counted, extra
from tpcore.layers.module import move_model_to_device
from tpcore.runtime.context import ParallelContext
from tpcore.runtime.init import init, shutdown
from tpcore.testing.twin import compare
from tpcore_hf.api import parallelize
from tpcore_hf.private import set_experts

TOLERANCES = {
    torch.float64: 1e-5,  # norms and routers of transformers round to float32, whose step is 1e-7
    torch.float32: 1e-3,  # layers stand above them, and gradients of the first are sums of many of either sign
}
LARGEST = 50_000_000  # parameters; each rank has the whole copy too, with gradients
_LAYERS = re.compile(r"num_hidden_layers|n_layers?|(num_)?((en|de)coder_)?layers|depth")
_WIDTHS = re.compile(
    r".*intermediate_size|.*ffn_(hidden_size|dim)|d_ff|n_inner|(q|kv|o)_lora_rank|moe_hidden_size|shared_.*_size"
)
_BESIDE = ("out_hidden_size", "word_embed_proj_dim")  # other names of the hidden size
_SMALL, _VOCABULARY = 16, 128


@dataclass
class ModelVerdict:
    """What came of a model. ``wrong``: what differs first; ``refused``: why it was not sharded at all."""

    lines: list[str]
    wrong: str | None = None
    refused: str | None = None


def verify_model(backend: str | None, tp: int, folder: str, options: dict[str, Any], ep: int = 1) -> ModelVerdict:
    """Start this rank, and compare a tiny copy of the model in ``folder``, sharded with ``options``, with the whole."""
    torch.set_num_threads(1)
    ctx = init(backend, tp=tp, ep=ep)
    try:
        return compared(ctx, folder, options)
    except ValueError as e:
        return ModelVerdict([], refused=str(e))
    finally:
        shutdown()


def compared(ctx: ParallelContext, folder: str, options: dict[str, Any]) -> ModelVerdict:
    """Of the ranks of ``ctx``. ValueError for a model that is refused, or of which no tiny copy is known."""
    tp, ep = ctx.comm("tp").size, ctx.over_axis("ep")
    ranks = 1 if ep is None else ep.size
    # some backends compute in 32 bits at most
    dtype = next(d for d in TOLERANCES if d in ctx.backend.capabilities.dtypes)
    whole = tiny_model(folder, tp).to(dtype)
    inputs = inputs_of(whole, tp, ranks)
    model = parallelize(deepcopy(whole), **options)
    if ep is not None:
        if "labels" not in inputs:
            raise ValueError(f"{type(whole).__name__} has no loss of labels, of which ep={ranks} ranks take the mean")
        _by_examples(whole, ranks)
        _of_rank(model, ep, ctx.index(ctx.batch))
    total, mine = (sum(p.numel() for p in m.parameters()) for m in (whole, model))
    lines = [
        f"a tiny copy of {type(whole).__name__} ({whole.config.model_type}): {total:,} parameters in {str(dtype)[6:]}, "
        f"of which a rank of tp={tp}{'' if ep is None else f', ep={ranks}'} holds {mine / total:.0%}"
    ]
    moved = {name: x.to(ctx.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    try:
        sharded, plain = (move_model_to_device(m, ctx.device) for m in (model, whole))
        compare(sharded, plain, moved, tolerance=TOLERANCES[dtype], reduce=ep is not None)
    except (AssertionError, ValueError) as e:  # of the comparison, or of a step that finds it out by itself
        return ModelVerdict(lines, wrong=str(e))
    named = dict(whole.named_parameters())
    without = [name for name, p in named.items() if p.grad is None]
    lines.append(
        f"output, loss and {counted(len(named) - len(without), 'gradient')} are the whole model's, to "
        f"{TOLERANCES[dtype]:.0e} of the largest value of each"
    )
    if without:
        lines.append(f"not compared, for text gives them no gradient: {', '.join(without[:3])}, {len(without)} in all")
    return ModelVerdict(lines)


def _rows(inputs: Mapping[str, Any], ranks: int, index: int) -> dict[str, Any]:
    return {name: x.chunk(ranks)[index] if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}


def _by_examples(whole: Any, ranks: int) -> None:
    """Let ``whole`` give the mean of the losses of so many equal parts of a batch, as data ranks have them."""
    forward = whole.forward

    def run(**inputs: Any) -> Any:
        outs = [forward(**_rows(inputs, ranks, i)) for i in range(ranks)]
        return type(outs[0])(
            loss=torch.stack([out.loss for out in outs]).mean(), logits=torch.cat([out.logits for out in outs])
        )

    whole.forward = run


def _of_rank(model: Any, ep: Comm, index: int) -> None:
    """Let ``model`` take this rank's examples, and give all logits and the mean loss with the gradient of its own."""
    forward = model.forward

    def run(**inputs: Any) -> Any:
        out = forward(**_rows(inputs, ep.size, index))
        loss = out.loss.detach()
        mean = ep.all_reduce(loss.reshape(1))[0] / ep.size
        return type(out)(loss=out.loss + (mean - loss), logits=ep.all_gather(out.logits.detach(), 0))

    model.forward = run


def tiny_model(folder: str | os.PathLike[str], tp: int) -> Any:
    """A tiny copy of the model whose ``config.json`` is in ``folder``, with random weights, in float64. ValueError
    where its sizes depend on each other in ways that this does not know."""
    with extra("hf", "tpcore verify --model"):
        import transformers
    config = transformers.AutoConfig.from_pretrained(folder)
    names = [name for name in config.architectures or () if hasattr(transformers, name)]
    kind = getattr(transformers, names[0]) if names else _causal(transformers, config)
    with torch.device("meta"):
        model = kind(deepcopy(config))
    if model.main_input_name != "input_ids":
        raise ValueError(f"{kind.__name__} takes {model.main_input_name}, and --model compares models of text")
    depth = _depth(model)
    why: Exception | None = None
    # not as small, where a part of each head is rotated; at last only fewer layers, and what is narrowed in any case
    larger_heads = partial(_narrow_heads, most=4 * _SMALL)
    for shrink in (_separate_heads, _narrow_heads, larger_heads, lambda text, tp: None):
        for layers in (depth, None):  # all of them, if some layers refer to others
            try:
                return _made(kind, _less(config, tp, shrink, layers))
            except Exception as e:  # noqa: BLE001  whatever a family says of sizes that do not fit
                why = why or e
    raise ValueError(f"no tiny copy of this {kind.__name__} ({config.model_type}) computes: {why}") from why


def _causal(transformers: Any, config: Any) -> Any:
    try:
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ValueError(f"config.json names no architecture of transformers {transformers.__version__}") from None


def inputs_of(model: Any, tp: int, ep: int = 1) -> dict[str, Any]:
    """Two rows of tokens for each ep rank, whose number tp divides."""
    ids = torch.randint(3, _VOCABULARY // 2, (2 * ep, 8 * tp), generator=torch.Generator().manual_seed(1))
    inputs: dict[str, Any] = {"input_ids": ids}
    if model.get_output_embeddings() is not None:
        inputs["labels"] = ids
    elif model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    # keys and values of a cache would be this rank's alone
    return inputs | ({"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {})


def _made(kind: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    """A model in which every parameter matters: no bias is zero and no norm is one."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind(deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are left of it, above {LARGEST:,}")
    torch.manual_seed(0)
    model = kind(config).double().eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=draw, dtype=p.dtype) / (p.shape[-1] ** 0.5 if p.ndim > 1 else 10))
        model(**inputs_of(model, 1))
    return model


def _depth(model: nn.Module) -> int:
    """How many of the first layers have one of each kind, by their parameters."""
    needed = 2
    for blocks in model.modules():
        if isinstance(blocks, nn.ModuleList):
            seen: set[Any] = set()
            for i, block in enumerate(blocks):
                kind = tuple((n, type(block).__name__, tuple(p.shape)) for n, p in block.named_parameters())
                needed = needed if kind in seen else max(needed, i + 1)
                seen.add(kind)
    return needed


def _less(config: Any, tp: int, shrink: Callable[[Any, int], None], depth: int | None) -> Any:
    config = deepcopy(config)
    text = config.get_text_config()
    before = text.hidden_size  # transformers has this name for each family's own
    shrink(text, tp)
    for part in _parts(config):
        _narrow(part, tp, {before: text.hidden_size})
        if depth is not None:
            _shorten(part, depth)
        set_experts(part, "eager")  # the default kernel takes no float64
    return config


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those inside of it."""
    yield config
    for name in getattr(config, "sub_configs", ()):
        if getattr(config, name, None) is not None:
            yield from _parts(getattr(config, name))


def _narrow(part: Any, tp: int, hidden: dict[int, int]) -> None:
    vocabulary = 0
    for name, value in list(vars(part).items()):
        if type(value) is not int or value <= 0:
            continue
        if name.startswith("vocab_size") and value > _VOCABULARY:
            vocabulary = _VOCABULARY + value % tp
            setattr(part, name, vocabulary)
        elif name in _BESIDE:
            setattr(part, name, hidden.get(value, value))
        elif _WIDTHS.fullmatch(name):
            setattr(part, name, _width(value, tp))
    for name, value in list(vars(part).items()):
        if vocabulary and name.endswith("token_id") and isinstance(value, int) and value >= vocabulary:
            setattr(part, name, vocabulary - 1)


def _shorten(part: Any, depth: int) -> None:
    for name, layers in list(vars(part).items()):
        if _LAYERS.fullmatch(name) and type(layers) is int:
            lists = {n: v for n, v in vars(part).items() if isinstance(v, list) and len(v) == layers}
            # a value that comes later, as the full attention after five sliding ones
            last = max((v.index(x) + 1 for v in lists.values() for x in v), default=0)
            few = min(layers, max(depth, last))
            for each, values in lists.items():
                setattr(part, each, values[:few])
            setattr(part, name, few)


def _width(size: int, tp: int) -> int:
    """Less, and tp divides it if it divides ``size``. Equal sizes stay equal."""
    less = gcd(size, _SMALL * tp)
    return less if less >= _SMALL // 2 else size


def _head_dim(text: Any) -> int | None:
    """0 without that option, -1 where layers have their own."""
    try:
        return getattr(text, "head_dim", 0)
    except Exception:  # noqa: BLE001  not an AttributeError, so that nobody takes one layer's for all
        return -1


def _separate_heads(text: Any, tp: int) -> None:
    """The hidden size is less; the size of a head, which is an option of its own, stays."""
    size = _head_dim(text)
    if size == 0 and not hasattr(text, "qk_rope_head_dim"):
        _narrow_heads(text, tp)
        return
    if size is None:
        text.head_dim = text.hidden_size // text.num_attention_heads
    text.hidden_size = _width(text.hidden_size, tp)


def _narrow_heads(text: Any, tp: int, most: int = _SMALL) -> None:
    """As many heads, of a smaller size."""
    size = gcd(text.hidden_size // text.num_attention_heads, most)
    text.hidden_size = text.num_attention_heads * size
    if _head_dim(text) != 0:
        text.head_dim = size
