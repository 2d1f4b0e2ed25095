"""Sequence parallelism: between the cut regions of a block each rank keeps some of the tokens.

Activations are ``[batch, tokens, features]``, cut along dim 1. The modules that call column layers, attention
and MLP, get all tokens, not only the layers inside: an attention's views read the number of tokens.
Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from tpcore.comm.comm import Comm
from tpcore.comm.mappings import Map
from tpcore.layers import RowParallelLinear
from tpcore.layers.module import ParallelModule
from tpcore.layers.tokens import TokenRegion
from tpcore.train.pipeline import PipelinedLayers

from ..plan import rules as plan
from ..plan.decisions import Cut
from ..plan.inputs import classes, is_known, is_own, is_refilled, is_watched
from ..plan.rules import wildcard
from ..shard.forwards import Draws, columns_by_owner, draw_inside, share_inputs, sum_gradients, with_forward

_BLOCK = "_tpcore_token_region"


@dataclass(eq=False)
class Stack:
    """What the blocks of a list know of the calls around them."""

    always: bool
    """Whether nothing but blocks is between blocks, and they run in no caller: those of a pipeline."""
    blocks: list[type[nn.Module]] = field(default_factory=list)
    calls: list[tuple[bool, bool]] = field(default_factory=list)
    """Of those under way, whether one loops over the blocks itself, and needs whole tokens in between."""

    def is_open(self) -> bool:
        """Whether each rank may keep some of the tokens from block to block."""
        return self.always or (bool(self.calls) and self.calls[-1][0] and not any(held for _, held in self.calls))


@dataclass(eq=False)
class BlockTokens:
    """What the class of a block knows of it."""

    name: str
    region: TokenRegion
    stack: Stack
    is_last: bool
    watched: dict[str, list[type[nn.Module]]]
    """The modules that would see this rank's tokens, and the classes of what is in them; empty: it has all tokens."""

    def spreads(self, block: nn.Module) -> bool:
        """Whether nothing of a user's own would see some tokens: a hook, a forward set on a module, or another module
        or class where one was."""
        seen = ((block.get_submodule(name), inside) for name, inside in self.watched.items())
        return bool(self.watched) and not any(is_watched(m) or is_refilled(m, inside) for m, inside in seen)


def _spread(module: nn.Module, block: BlockTokens) -> None:
    """Give ``module`` its tokens in the form that it can take. Around its call, between blocks of transformers' own
    loop each rank keeps some; hooks are inside. In the forward itself, which recomputation runs again, the form of the
    input is all that decides, and whole tokens leave where whole ones came."""
    original = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block: BlockTokens = self.__dict__[_BLOCK]
        region, x = block.region, args[0] if args else kwargs["hidden_states"]
        keeps = block.spreads(self)
        if region.is_marked(x, block.name) and not keeps:
            args, kwargs = _before(region.leave, self, args, kwargs)
        elif keeps and block.stack.is_open() and region.divides(x):
            args, kwargs = _before(region.enter, self, args, kwargs)
        output = original.__call__(self, *args, **kwargs)
        return _after(region.leave, self, args, output) if block.is_last else output

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        block: BlockTokens = self.__dict__[_BLOCK]
        region, x = block.region, args[0] if args else kwargs["hidden_states"]
        marked = region.is_marked(x, block.name)
        active = marked or (region.divides(x) and block.spreads(self))
        if active:
            args, kwargs = _before(region.bare if marked else region.chunk, self, args, kwargs)
        before, region.active = region.active, active
        try:
            output = original.forward(self, *args, **kwargs)
        finally:
            region.active = before
        return _after(region.marked if marked else region.whole, self, args, output) if active else output

    module.__dict__[_BLOCK] = block
    module.__class__ = with_forward(original, forward, {"__call__": call})


def _before(change: Map, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook that changes a module's hidden states, its first argument."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _after(change: Map, module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that changes a module's hidden states, its first output."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple | list) else change(output)


def _leave(region: TokenRegion, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A hook that keeps this rank's tokens of a first output, be it ``[batch * tokens, features]``."""
    entered = args[0] if args else kwargs["hidden_states"]
    return _after(lambda tokens: region.scattered(tokens.reshape(entered.shape)), module, args, output)


def _hold(stack: Stack, name: str | None, caller: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook of the modules around the blocks that notes whether each rank may keep some of the tokens between them:
    in a loop over them that is transformers' own, in the module that has them under ``name``, unless what is there is
    needed whole: the caller wants it, or passes a tensor for each of some blocks, to add where a rank would have other
    tokens."""
    names = ("output_hidden_states", "output_attentions")
    between = (v for name, v in kwargs.items() if name != "attention_mask" and isinstance(v, (list, dict)))
    added = any(isinstance(t, Tensor) for v in between for t in (v.values() if isinstance(v, dict) else v))
    config = getattr(caller, "config", None)
    loops = name is not None and is_own(caller) and classes(getattr(caller, name)) == stack.blocks
    stack.calls.append((loops, added or any(kwargs.get(n, getattr(config, n, False)) for n in names)))


def _release(stack: Stack, caller: nn.Module, args: Any, output: Any) -> None:
    if stack.calls:  # another hook may have failed before this one's partner
        stack.calls.pop()


def cut_sequence(model: nn.Module, cuts: list[Cut], comm: Comm, draws: Draws) -> list[str]:
    """Cut the tokens between the blocks of every stack that has cut layers. Returns around what they stay whole, for it
    may mix them. ValueError if that is in every block."""
    whole, spread = dict[str, None](), False
    if getattr(model.config, "layerdrop", 0) or getattr(model.config, "decoder_layerdrop", 0):
        raise ValueError("sequence_parallel=True: with layerdrop the last block may not run; set it to 0")
    for name, blocks in _stacks(model, cuts):
        callers, at = name.split(".")[:-1], name.rpartition(".")[2]
        around = [model.get_submodule(".".join(callers[:i])) for i in range(len(callers) + 1)]
        stack, children = Stack(isinstance(blocks, PipelinedLayers)), [*blocks.named_children()]
        for number, block in children:
            region, path = TokenRegion(comm), f"{name}.{number}"
            inside = [cut for cut in cuts if f"{cut.name}.".startswith(f"{path}.")]
            watched, mixers = _cut_block(model, path, inside, region, draws, blocks)
            whole |= dict.fromkeys(mixers)
            spread = spread or not mixers
            _spread(block, BlockTokens(path, region, stack, block is children[-1][1], watched))
        stack.blocks = classes(blocks)
        if not (stack.always or is_own(around[-1])):
            whole[f"{'.'.join(callers) or 'the model'} ({type(around[-1]).__name__})"] = None
        for caller in around:
            hold = partial(_hold, stack, at if caller is around[-1] else None)
            caller.register_forward_pre_hook(hold, with_kwargs=True)
            caller.register_forward_hook(partial(_release, stack), always_call=True)
    if not spread:
        raise ValueError(
            "sequence_parallel=True: in every block what is whole and no norm, or has a forward that is not "
            f"transformers' own, may mix tokens, of which each rank would have some: {', '.join(whole)}: leave "
            "sequence_parallel out"
        )
    return [*whole]


def _cut_block(
    model: nn.Module, name: str, cuts: list[Cut], region: TokenRegion, draws: Draws, blocks: nn.Module
) -> tuple[dict[str, list[type[nn.Module]]], list[str]]:
    """Let what is in a block have its tokens by ``region``. Returns ``watched``, and what in it may mix them."""
    block = model.get_submodule(name)
    routed = {cut.owner for cut in cuts if cut.style == plan.EXPERTS}
    of_experts = [cut for cut in cuts if any(cut.name.startswith(f"{owner}.") for owner in routed)]
    whole = {m for owner in routed for m in model.get_submodule(owner).modules()}
    rows = [m for m in block.modules() if isinstance(m, RowParallelLinear) and m not in whole]
    for row in rows:
        if row.input_is_parallel:
            row.sequence_dim, row.region = 1, region
    owners = routed | _enter_owners(model, [cut for cut in cuts if cut not in of_experts], region, blocks)
    share_inputs(model, of_experts)
    for owner in map(model.get_submodule, sorted(routed)):
        # it has all tokens, and returns this rank's: a router sees them all, as its loss is of the whole
        _enter(owner, "experts", region, blocks.children())
        owner.register_forward_hook(partial(_leave, region), with_kwargs=True)
        draw_inside(owner, draws)
    inner = tuple(f"{owner}." for owner in owners)
    outside = {path: m for path, m in block.named_modules(prefix=name) if not path.startswith(inner)}
    mixers = [f"{wildcard(path)} ({type(m).__name__})" for path, m in outside.items() if _mixes(m)]
    draw_inside(block, draws, region.is_active)
    for module in () if mixers else outside.values():
        if not isinstance(module, ParallelModule) and [*module.parameters(recurse=False)]:
            sum_gradients(module, region.comm, region.is_active)
    seen = {} if mixers else {path: m for path, m in block.named_modules() if m in {*outside.values(), *rows}}
    return {path: classes(m) for path, m in seen.items()}, mixers


def _mixes(module: nn.Module) -> bool:
    """Whether it might compute with several tokens."""
    # of transformers' own classes with parameters these are known by their names alone; a user's are not known
    normed = isinstance(module, ParallelModule) or any(word in type(module).__name__ for word in ("Norm", "Scale"))
    return not is_known(module) or not (normed or not [*module.parameters(recurse=False)])


def _stacks(model: nn.Module, cuts: list[Cut]) -> Iterator[tuple[str, nn.ModuleList | PipelinedLayers]]:
    """The outermost lists of blocks with cut layers inside."""
    names: list[str] = []
    for name, module in model.named_modules():
        nested = any(name.startswith(other + ".") for other in names)
        blocks = any(cut.name.startswith(name + ".") for cut in cuts)
        if blocks and not nested and isinstance(module, nn.ModuleList | PipelinedLayers):
            names.append(name)
            yield name, module
    if not names:
        raise ValueError(f"sequence_parallel=True: {type(model).__name__} has no list of blocks with cut layers")


def _enter_owners(model: nn.Module, cuts: list[Cut], region: TokenRegion, blocks: nn.Module) -> set[str]:
    """Gather the tokens at the modules that call column layers; return the names of those modules."""
    columns = columns_by_owner(model, cuts)
    shared = share_inputs(model, cuts, region.copied)
    gathered = {cut.owner: cut.name.rpartition(".")[2] for cut in cuts if cut.style == plan.COLUMN_GATHERED}
    for name in (columns.keys() | gathered) - shared:
        owner, around = model.get_submodule(name), any(other.startswith(f"{name}.") for other in columns)
        calls = ", ".join(columns[name]) or gathered[name]
        _enter(owner, calls, region, [owner] if around else blocks.children())
    for name in gathered:  # the output of these is whole on every rank
        model.get_submodule(name).register_forward_hook(partial(_after, region.scattered))
    return columns.keys() | gathered.keys()


def _enter(owner: nn.Module, calls: str, region: TokenRegion, blocks: Iterable[nn.Module]) -> None:
    """Gather the tokens for a module that calls column layers, which is none of ``blocks``, nor around another such."""
    if any(owner is block for block in blocks):
        raise ValueError(
            f"sequence_parallel=True: {type(owner).__name__} calls {calls} itself, so "
            "that its tokens cannot enter whole there and stay cut elsewhere: this family works without"
        )
    owner.register_forward_pre_hook(partial(_before, region.gathered), with_kwargs=True)
