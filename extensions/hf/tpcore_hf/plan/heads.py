"""Attention heads: how features form heads, what fits a degree, and the local sizes that forward reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.layout.shard import Block

from .rules import COLUMN, Rule, general, wildcard

_HEAD_SIZE = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "attention_head_dim")
_HEAD_COUNT = ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head", "nhead")
_LOCAL = (*_HEAD_COUNT, "all_head_size", "split_size", "mp_num")
_LOCAL_KV = ("num_key_value_heads", "num_kv_heads")
_LOCAL_WIDTH = ("inner_dim", "embed_dim", "hidden_size", "attn_dim", "projection_dim", "kv_dim")


def head_size(owner: nn.Module) -> int | None:
    """Features of one head; None if ``owner`` is no attention module."""
    for name in _HEAD_SIZE:
        size = getattr(owner, name, None)
        if isinstance(size, int) and size > 0:
            return size
    if isinstance(getattr(owner, "split_size", None), int) and isinstance(getattr(owner, "n_head", None), int):
        return int(owner.split_size // owner.n_head)  # type: ignore[operator]
    return None


def key_value_width(config: Any) -> int:
    """Features of a key head and its value together, of a whole model's configuration."""
    latent = getattr(config, "qk_nope_head_dim", None)
    if latent:  # head_dim is that of the rotary part alone
        return int(latent + config.qk_rope_head_dim + config.v_head_dim)
    return 2 * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True)
class LocalConfig:
    """The configuration as one attention module reads it: the number of heads of one of ``ranks`` ranks. All else is
    the model's own, so that what is set there later holds here too."""

    whole: Any
    ranks: int
    heads: int | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("whole", "ranks", "heads"):  # a copy is asked before it has its fields
            raise AttributeError(name)
        value = getattr(self.whole, name)
        return (self.heads or value // self.ranks) if name in _HEAD_COUNT else value


def heads_argument(comm: Comm, heads: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook that keeps this rank's heads of arguments with entries for all: along dim 1 of four dims, else dim 0 is
    batch times heads."""

    def local(bias: Tensor) -> Tensor:
        if bias.ndim == 4:  # a mask is often the same for all heads
            return ops.scatter(bias, comm, 1) if bias.shape[1] == heads else bias
        return ops.scatter(bias.reshape(-1, heads, *bias.shape[1:]), comm, 1).flatten(0, 1)

    names = ("alibi", "position_bias", "attention_mask")
    return args, {**kwargs, **{n: local(kwargs[n]) for n in names if kwargs.get(n) is not None}}


def grouped(name: str, owner: nn.Module, size: int, queries: int) -> tuple[Block, Need]:
    """How ``size`` output features are cut in whole heads, in an attention with ``queries`` query features. Fewer are
    key or value heads that several queries share, and several ranks have the same head if tp is above their number. If
    there are more, each head has several parts side by side (q|k|v of GPT-NeoX)."""
    count = getattr(owner, "num_heads", None)
    if hasattr(owner, "kv_lora_rank") and isinstance(count, int) and size % count == 0:
        return Block(size, size // count), Need(name, count, "heads")  # of latent attention, in no common size
    names = name.split(".")  # of a layer, and of what it may be in
    # values may be wider than keys, and plans of transformers know projections by these names alone
    unit = getattr(owner, "v_head_dim", None) if "v_proj" in names else None
    unit = unit if isinstance(unit, int) else head_size(owner)
    if unit is None or size % unit:
        return Block(size), Need(name, size, "features")
    if size > queries and queries and size % queries == 0:
        unit *= size // queries
    shared = size < queries and "q_proj" not in names
    what = "key/value heads" if shared else "heads"
    return Block(size, unit, replicate=shared), Need(name, size // unit, what, shared)


def groups(name: str, owner: nn.Module, rule: Rule, model_type: str | None) -> list[Need]:
    """What CodeGen's q|v|k need, which are those of groups of heads. ValueError where forward would read parts of other
    groups: by a ``rule`` that parts them, and in releases whose attention has no number of groups, and reads four."""
    count = getattr(owner, "mp_num", None)
    if isinstance(count, int) and rule == COLUMN:
        return [Need(name, count, "groups of heads")]
    if count is not None or (model_type == "codegen" and head_size(owner) is not None):
        raise ValueError(
            f"{name} ({type(owner).__name__}) holds q|v|k of four groups of heads, and forward would read others "
            f"with {rule!r}: plan={{{wildcard(name)!r}: 'replicate'}} leaves it whole"
        )
    return []


def fused(name: str, owner: nn.Module, size: int, queries: int) -> tuple[tuple[Block, ...], list[Need]]:
    """The blocks of q|k|v in one layer of ``size`` output features; ``queries`` of them are query heads."""
    kv, odd = divmod(size - queries, 2)
    if odd or kv < 1 or head_size(owner) is None:
        raise ValueError(
            f"{name} ({type(owner).__name__}): {size} features are not q|k|v with {queries} of the queries"
        )
    parts = [grouped(name, owner, part, queries) for part in (queries, kv, kv)]
    return tuple(block for block, _ in parts), [need for _, need in parts]


class LocalHeads(NamedTuple):
    """The numbers of heads that one rank computes, where some ranks' are zeros."""

    queries: int
    keys: int


def localize(owner: nn.Module, n: int, copies: int, width: int, padded: LocalHeads | None = None) -> None:
    """Set the numbers of heads and features that ``owner``'s forward reads to those of one rank. ``copies``: how many
    ranks have each key and value head. ``width``: the features of all query heads."""
    for name, count in [(name, count) for name, count in vars(owner).items() if isinstance(count, int)]:
        if padded is not None and name in (*_LOCAL, *_LOCAL_KV, *_LOCAL_WIDTH):
            value = _padded(name, count, width, head_size(owner) or 1, padded)
            setattr(owner, name, value)
        elif name in _LOCAL and count % n == 0:
            setattr(owner, name, count // n)
        elif name in _LOCAL_KV:
            setattr(owner, name, max(1, count * copies // n))
        elif name in _LOCAL_WIDTH and count == width:
            setattr(owner, name, width // n)
    groups = getattr(owner, "num_key_value_groups", None)
    if (copies > 1 or padded is not None) and isinstance(groups, int):
        groups = groups // copies if padded is None else padded.queries // padded.keys
        setattr(owner, "num_key_value_groups", groups)  # noqa: B010  typed as a module otherwise
    if "config" in vars(owner):
        setattr(owner, "config", LocalConfig(owner.config, n, padded and padded.queries))  # noqa: B010  typed as a module otherwise


def _padded(name: str, count: int, width: int, unit: int, padded: LocalHeads) -> int:
    """What an attribute that was ``count`` says of a rank."""
    if name in _LOCAL_KV:
        return padded.keys
    return {width // unit: padded.queries, width: padded.queries * unit}.get(count, count)


@dataclass(frozen=True)
class Need:
    """``count`` indivisible units (heads, features) that a module's cut has to distribute evenly."""

    name: str
    count: int
    what: str
    shared: bool = False
    """Whether several ranks may have the same unit if there are more ranks than units."""
    padded: bool = False
    """Whether some ranks may have fewer units than others."""

    def said(self, model: nn.Module) -> str:
        return f"{general(model, self.name)} has {self.count} {self.what.removesuffix('s' * (self.count == 1))}"

    def fits(self, n: int) -> bool:
        return self.count % n == 0 or (self.shared and n % self.count == 0) or (self.padded and n <= self.count)


def check_fit(model: nn.Module, needs: Sequence[Need], tp: int) -> None:
    """Raise a ValueError that names every misfit at this degree and the degrees that fit."""
    misfits = {need.said(model) for need in needs if not need.fits(tp)}
    if not misfits:
        return
    largest = max(need.count for need in needs)
    fitting = [n for n in range(1, min(largest, 1024) + 1) if all(need.fits(n) for need in needs)]
    raise ValueError(
        f"tp={tp} does not fit {type(model).__name__}: {'; '.join(sorted(misfits))}. Degrees that fit: "
        f"{', '.join(map(str, fitting))}"
    )


_WHOLE = "_tpcore_whole"


@dataclass(frozen=True)
class _Gather:
    """A hook of a model of transformers. ``heads``: all heads of attentions by the number on one rank."""

    comm: Comm
    heads: Mapping[int, int]

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Mapping):
            for name in [name for name in output if "attentions" in name and output[name] is not None]:
                output[name] = tuple(map(self._whole, output[name]))  # type: ignore[index]
        elif kwargs.get("output_attentions", getattr(model.config, "output_attentions", False)):
            raise ValueError(
                f"output_attentions=True of a sharded {type(model).__name__} needs return_dict=True: in a "
                "tuple the weights of a rank's heads cannot be told from other outputs"
            )

    def _whole(self, weights: Tensor | None) -> Tensor | None:
        """``weights``, ``[batch, heads, tokens, tokens]``, of all heads. A model around this one finds them marked."""
        if weights is None or hasattr(weights, _WHOLE):
            return weights
        if weights.ndim != 4 or weights.shape[1] not in {*self.heads, *self.heads.values()}:
            raise ValueError(
                f"output_attentions=True: in weights of shape {tuple(weights.shape)} the heads of this rank "
                "are not found, so that those of all ranks cannot be returned: leave it out"
            )
        if weights.shape[1] not in self.heads:  # of an attention that every rank has whole
            return weights
        heads = self.heads[weights.shape[1]]  # padding is behind them
        whole = ops.gather(weights, self.comm, 1).narrow(1, 0, heads)
        setattr(whole, _WHOLE, True)
        return whole


def gather_attentions(
    model: nn.Module, heads: Mapping[nn.Module, int], local: Mapping[nn.Module, int], comm: Comm
) -> None:
    """Return the weights of all heads where they are asked for. ``heads``: the number of all query heads of
    each sharded attention. ``local``: of a rank's, where some are padding."""
    from transformers import PreTrainedModel

    for part in model.modules():
        inside = {local.get(m, heads[m] // comm.size): heads[m] for m in part.modules() if m in heads}
        if inside and isinstance(part, PreTrainedModel):
            part.register_forward_hook(_Gather(comm, inside), with_kwargs=True)
