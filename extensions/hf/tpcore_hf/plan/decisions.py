"""The cuts of a model: rules become one decision for each module, before any change.

A plan has no rule for a module that its author did not think of. After a sharded projection its gradient would be that
of this rank's heads, in silence: each such module is as wide as whole values, has a rule, or is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from tpcore.layout.shard import Block, ShardSpec

from ..experts.layers import specs_of
from . import rules as plan
from .heads import LocalHeads, Need, fused, grouped, groups, head_size
from .rules import Rule, general, rule_of, unknown_style

LINEAR = frozenset(
    {plan.COLUMN, plan.COLUMN_GATHERED, plan.ROW, plan.ROW_SPLIT}
    | {plan.PACKED_COLUMN, plan.PACKED_ROW, plan.QKV_COLUMN}
)
_WHOLE_VALUES = (plan.COLUMN_GATHERED, plan.ROW_SPLIT)
EMBEDDING = frozenset({plan.EMBEDDING_ROW, plan.EMBEDDING_COLUMN, plan.EMBEDDING_HEADS})
_OF_EXPERTS = (plan.EXPERTS, plan.PARTIAL)
"""Of modules with bare parameters that have rules of their own."""


@dataclass(frozen=True)
class Cut:
    """One module and the style in which it is sharded."""

    name: str
    module: nn.Module
    style: str
    owner: str
    """The name of the module whose forward computes with its features."""
    blocks: tuple[Block, ...] | None = None
    needs: tuple[Need, ...] = ()
    specs: Mapping[str, ShardSpec] | None = None
    """Of the module's own bare parameters, for experts."""
    padded: LocalHeads | None = None
    """The heads of a rank, some ranks' of zeros, where tp does not divide them."""

    def copies(self, n: int) -> int:
        """How many of ``n`` ranks have each unit of the last block."""
        if not self.blocks:
            return 1
        block = self.blocks[-1]
        return max(1, n // (block.size // block.unit)) if block.replicate else 1


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear map with a weight of its own, transformers' Conv1D included."""
    return isinstance(module, nn.Linear) or hasattr(module, "nf")


def features(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear map."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    weight = module.get_parameter("weight")
    return weight.shape[0], weight.shape[1]


def owner_of(model: nn.Module, name: str, rule: Rule) -> str:
    """The module whose forward computes with what ``name`` has of a rank: the one around it, or, where it is the one
    linear layer of modules inside an attention, of one that clips its values for instance, the attention."""
    module, owner = model.get_submodule(name), name.rpartition(".")[0]
    around = "" if rule in _WHOLE_VALUES else owner
    while around and head_size(model.get_submodule(around)) is None:
        if [m for m in model.get_submodule(around).modules() if is_linear(m)] != [module]:
            return owner
        around = around.rpartition(".")[0]
    return around or owner


def decide(model: nn.Module, rules: Mapping[str, Rule], expert_parallel: bool = False, ep: int = 1) -> list[Cut]:
    """All cuts that ``rules`` ask for. One ValueError names every rule that does not suit its module.
    ``expert_parallel``: whole experts are distributed over tp, instead of the features of all. ``ep``: among how many
    ranks the experts are divided besides."""
    matched, wrong = [], dict[str, str]()
    whole = tuple(f"{name}." for name, _ in model.named_modules() if rule_of(name, rules) == plan.REPLICATE)
    for name, module in model.named_modules():
        rule = rule_of(name, rules)
        if rule is None or rule in (plan.REPLICATE, plan.LOCAL_PARAMETERS) or name.startswith(whole):
            continue
        _check_plain(name, module)
        mismatch = _mismatch(general(model, name), module, rule)
        if mismatch is None:
            matched.append((name, module, rule))
        else:
            wrong[name] = mismatch
    modules = {name for name, _ in model.named_modules()}
    bare, by_heads = defaultdict[str, dict[str, str]](dict), dict[str, Cut]()
    for name, p in model.named_parameters(remove_duplicate=False):
        rule, (owner, _, leaf) = rule_of(name, rules), name.rpartition(".")
        if rule is None or rule == plan.REPLICATE or name in modules or owner in wrong or name.startswith(whole):
            continue
        if rule_of(owner, rules) in _OF_EXPERTS and isinstance(rule, str):
            bare[owner][leaf] = rule
        elif rule_of(owner, rules) == plan.LOCAL_PARAMETERS and rule == plan.COLUMN:  # such as sinks
            blocks, need, around = (Block(p.shape[0], 1),), Need(name, p.shape[0], "heads"), owner.rpartition(".")[0]
            by_heads[owner] = Cut(owner, model.get_submodule(owner), plan.PARAMETER_HEADS, around, blocks, (need,))
        else:
            wrong[name] = unknown_style(plan.wildcard(name), type(p), str(rule), owner)
    if wrong:
        raise ValueError("; ".join(dict.fromkeys(wrong.values())))
    if expert_parallel and not any(rule == plan.EXPERTS for *_, rule in matched):
        raise ValueError(f"expert_parallel=True: {type(model).__name__} has no layers of experts that its plan shards")
    queries = _queries(model, matched)
    cuts = []
    for name, module, rule in matched:
        if rule in _OF_EXPERTS:
            spread = (expert_parallel, ep) if rule == plan.EXPERTS else (False, 1)
            specs, needs = specs_of(name, module, bare[name], *spread)
            cuts.append(Cut(name, module, str(rule), owner_of(model, name, rule), None, tuple(needs), specs))
        else:
            cuts.append(_cut(model, name, module, rule, queries))
    return [*cuts, *by_heads.values()]


def _check_plain(name: str, module: nn.Module) -> None:
    """ValueError for a weight of a tensor class of its own, of which no part can be made."""
    for p in module.parameters(recurse=False):
        if type(p) is not nn.Parameter:
            raise ValueError(
                f"{name} has a weight of {type(p).__module__}.{type(p).__qualname__}, and quantized weights cannot be "
                f"sharded: give parallelize those that it was quantized from, or {_leave(name)}"
            )


def _leave(name: str) -> str:
    """The remedy for a module that cannot be sharded: its owner's other layers would not fit a whole one."""
    owner = plan.wildcard(name.rpartition(".")[0] or name)
    return f"plan={{{owner!r}: 'replicate'}} leaves all of that whole on every rank"


def _mismatch(name: str, module: nn.Module, rule: Rule) -> str | None:
    kind = type(module)
    if not isinstance(rule, str):
        linear = is_linear(module)
        return None if linear else f"{name} ({kind.__name__}) is no linear layer, which blocks={rule} would cut"
    if rule not in plan.STYLES:
        return unknown_style(name, type(module), rule)
    suits = is_linear(module) if rule in LINEAR else rule not in EMBEDDING or isinstance(module, nn.Embedding)
    if rule == plan.PARAMETER_HEADS and len(_heads_of(module)) != 1:
        return f"{name} ({kind.__name__}) has no entry, and no module, for each head, as {rule!r} shards them"
    if suits:
        return None
    return (
        f"{name} is a {kind.__module__}.{kind.__qualname__}, and style {rule!r} shards "
        f"{'a linear layer' if rule in LINEAR else 'an embedding'} of torch or transformers alone: {_leave(name)}"
    )


def _heads_of(module: nn.Module) -> set[int]:
    """The numbers of heads for which a module has entries in its parameters, or one module each."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    return {len(child) for child in lists} if lists else {p.shape[0] for p in module.parameters() if p.ndim == 2}


def _queries(model: nn.Module, matched: list[tuple[str, nn.Module, Rule]]) -> dict[str, int]:
    """For each owner, the features of all query heads, which its output projection reads."""
    rows: dict[str, int] = {}
    columns: dict[str, int] = defaultdict(int)
    for name, module, rule in matched:
        owner = owner_of(model, name, rule)
        if rule == plan.ROW:
            rows[owner] = features(module)[0]
        elif rule == plan.COLUMN:
            columns[owner] = max(columns[owner], features(module)[1])
    return {**columns, **rows}


def _cut(model: nn.Module, name: str, module: nn.Module, rule: Rule, queries: Mapping[str, int]) -> Cut:
    around = owner_of(model, name, rule)
    owner, width = model.get_submodule(around), queries.get(around, 0)
    columns = rule in (plan.COLUMN, plan.QKV_COLUMN) or not isinstance(rule, str)
    blocks: tuple[Block, ...] | None = None
    kind = getattr(getattr(model, "config", None), "model_type", None)
    needs = groups(name, owner, rule, kind) if columns else []
    if not isinstance(rule, str):
        blocks, size = tuple(Block(*block) for block in rule), head_size(owner)
        # in an attention a unit of several heads is a key/value head with its queries
        kinds = ["key/value heads" if size and b.unit > size else "units" for b in blocks]
        needs += [Need(name, b.size // b.unit, k, b.replicate) for b, k in zip(blocks, kinds, strict=True)]
    elif isinstance(module, nn.Embedding):
        needs = [Need(name, module.embedding_dim, "heads")] if rule == plan.EMBEDDING_HEADS else []
    elif rule == plan.COLUMN:
        block, need = grouped(name, owner, features(module)[1], width)
        blocks, needs = (block,), [*needs, need]
    elif rule == plan.QKV_COLUMN:
        blocks, more = fused(name, owner, features(module)[1], width)
        needs += more
    elif rule == plan.PARAMETER_HEADS:
        (count,) = _heads_of(module)
        blocks, needs = (Block(count, 1, replicate=True),), [Need(name, count, "heads", shared=True)]
    elif rule == plan.ROW:
        needs = [Need(name, features(module)[0], "input features")]
    elif rule in (plan.PACKED_COLUMN, plan.PACKED_ROW):
        inputs, outputs = features(module)
        size = outputs if rule == plan.PACKED_COLUMN else inputs
        if size % 2:
            raise ValueError(f"{name}: {size} features are not two of equal size, as {rule} cuts them")
        blocks, needs = (Block(size // 2),) * 2, [Need(name, size // 2, "features in each half")]
    return Cut(name, module, rule if isinstance(rule, str) else plan.COLUMN, around, blocks, tuple(needs))


def attentions(model: nn.Module, cuts: list[Cut]) -> Iterator[tuple[nn.Module, int, list[Cut]]]:
    """(module, features of its queries, its cut projections) for each attention module."""
    of_owner: dict[str, list[Cut]] = defaultdict(list)
    for cut in cuts:
        of_owner[cut.owner].append(cut)
    for name, owned in of_owner.items():
        owner = model.get_submodule(name)
        columns = [cut for cut in owned if cut.style in (plan.COLUMN, plan.QKV_COLUMN, plan.EMBEDDING_HEADS)]
        if columns and head_size(owner) is not None:
            rows = [features(cut.module)[0] for cut in owned if cut.style == plan.ROW]
            widths = [features(c.module)[1] for c in columns if is_linear(c.module)]
            yield owner, max(rows or widths or [0]), columns


OPENS = frozenset({plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN, plan.EMBEDDING_HEADS})
CLOSES = frozenset({plan.ROW, plan.PACKED_ROW})


def check_inside(model: nn.Module, cuts: list[Cut], rules: Mapping[str, Rule]) -> None:
    """One ValueError names all modules without a rule that sharded features may reach, for none surely stays right."""
    ends = [cut for cut in cuts if cut.style in OPENS | CLOSES]
    opened, closed = (_ancestors([cut for cut in ends if cut.style in s]) for s in (OPENS, CLOSES))
    wrong: list[str] = []
    for name, block in model.named_modules():
        prefix = f"{name}." if name else ""
        columns = {child for child, _ in block.named_children() if prefix + child in opened - closed}
        rows = {child for child, _ in block.named_children() if prefix + child in closed}
        if not (columns or (rows and name not in opened)):
            continue  # no sharded features pass here, but perhaps in blocks inside
        near = [cut for cut in ends if cut.name.startswith(prefix)]
        for child, part in _whole(name, block, rules):
            if child not in columns | rows and not _is_wide(part, near, block):
                wrong.append(_refusal(model, prefix + child, part, name, block))
    if wrong:
        raise ValueError("; ".join(dict.fromkeys(wrong)))


def _whole(name: str, block: nn.Module, rules: Mapping[str, Rule]) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """The children and the parameters of ``block`` that have parameters and no rule."""
    for child, module in block.named_children():
        if next(module.parameters(), None) is not None and rule_of(f"{name}.{child}", rules) is None:
            yield child, module
    for child, p in block.named_parameters(recurse=False):
        if rule_of(f"{name}.{child}", rules) is None and rule_of(name, rules) != plan.SUMMED:
            yield child, p


def _ancestors(cuts: list[Cut]) -> set[str]:
    """The names of the cut modules and of all modules around them."""
    parts = [cut.name.split(".") for cut in cuts]
    return {".".join(names[:i]) for names in parts for i in range(len(names) + 1)}


def _shapes(part: nn.Module | nn.Parameter) -> set[tuple[int, ...]]:
    tensors = [part] if isinstance(part, nn.Parameter) else part.parameters()
    return {tuple(p.shape) for p in tensors}


def _is_wide(part: nn.Module | nn.Parameter, near: list[Cut], block: nn.Module) -> bool:
    """Whether it is as wide as the block's whole inputs and outputs: sharded features have not this width."""
    linear = [cut for cut in near if cut.style != plan.EMBEDDING_HEADS]
    wide = {features(cut.module)[cut.style in CLOSES] for cut in linear} - {head_size(block)}
    return all(len(shape) == 1 and shape[0] in wide for shape in _shapes(part))


def _refusal(model: nn.Module, name: str, part: nn.Module | nn.Parameter, owner: str, block: nn.Module) -> str:
    shapes = ", ".join(map(str, sorted(_shapes(part))))
    owner, name = (around and general(model, around) for around in (owner, name))
    summed = owner if isinstance(part, nn.Parameter) else name
    return (
        f"{name} ({type(part).__name__}, {shapes}) is whole inside the sharded "
        f"{type(block).__name__}, and no rule says how it is used: plan={{{summed!r}: "
        f"{plan.SUMMED!r}}} says that it treats all heads and features alike, of which it sees this rank's, "
        f"{{{name!r}: {plan.REPLICATE!r}}} that it sees, and meets, whole values only"
    )
