"""Sequence parallelism: between the cut regions of a block each rank keeps some of the tokens.

Activations are ``[batch, tokens, features]``, cut along dim 1. The modules that call column layers, attention
and MLP, get all tokens, not only the layers inside: an attention's views read the number of tokens.
Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.comm.mappings import Map
from tpcore.layers import RowParallelLinear
from tpcore.layers.adopt import is_hooked
from tpcore.layers.module import ParallelModule
from tpcore.layers.tokens import TokenRegion
from tpcore.train.pipeline import PipelinedLayers

from ..plan import rules as plan
from ..plan.decisions import Cut
from ..shard.forwards import (
    SUBSTITUTED,
    Draws,
    columns_by_owner,
    draw_inside,
    share_inputs,
    sum_gradients,
    with_forward,
)

_BLOCK = "_tpcore_token_region"


def _within(block: nn.Module, name: str, region: TokenRegion) -> None:
    """Let ``region`` know while ``block`` runs whether its tokens are cut. In the forward itself, which recomputation
    runs again; the form of its input is all that it reads."""
    original = type(block)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        (region, name), x = self.__dict__[_BLOCK], args[0] if args else kwargs["hidden_states"]
        active = region.is_marked(x, name)
        if active:
            args, kwargs = _before(region.bare, self, args, kwargs)
        before, region.active, region.grad = (region.active, region.grad), active, torch.is_grad_enabled()
        region.running, region.spread = True, active
        try:
            output = original.forward(self, *args, **kwargs)
        finally:
            region.active, region.grad = before
            region.running = False
        return _after(region.marked, self, args, output) if active else output

    block.__dict__[_BLOCK] = region, name
    block.__class__ = with_forward(original, forward)


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


def _hold(region: TokenRegion, caller: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook of the modules around the blocks that notes whether hidden states between them are needed whole: the
    caller wants them, or passes a tensor for each of some blocks, to add where a rank would have other tokens."""
    names = ("output_hidden_states", "output_attentions")
    between = (v for name, v in kwargs.items() if name != "attention_mask" and isinstance(v, list | dict))
    added = any(isinstance(t, Tensor) for v in between for t in (v.values() if isinstance(v, dict) else v))
    config = getattr(caller, "config", None)
    region.held.append(added or any(kwargs.get(n, getattr(config, n, False)) for n in names))


def _release(region: TokenRegion, caller: nn.Module, args: Any, output: Any) -> None:
    if region.held:  # another hook may have failed before this one's partner
        region.held.pop()


def _check_held(
    region: TokenRegion, blocks: nn.Module, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """A hook: ValueError where the first block may be recomputed with this hook, and the callers around it are gone."""
    recomputed = any(getattr(block, "gradient_checkpointing", False) for block in blocks.children())
    if any(region.held) and recomputed and blocks.training:
        raise ValueError(
            "sequence parallelism with activation checkpointing returns no hidden states between its blocks and adds "
            "nothing to them: leave out what asks for it, or one of the two"
        )


def cut_sequence(model: nn.Module, cuts: list[Cut], comm: Comm, draws: Draws) -> None:
    """Cut the tokens between the blocks of every stack that has cut layers."""
    if getattr(model.config, "layerdrop", 0) or getattr(model.config, "decoder_layerdrop", 0):
        raise ValueError("sequence_parallel=True: with layerdrop the last block may not run; set it to 0")
    for name, blocks in _stacks(model, cuts):
        inside = [cut for cut in cuts if cut.name.startswith(name + ".")]
        routed = {cut.owner for cut in inside if cut.style == plan.EXPERTS}
        of_experts = [cut for cut in inside if any(cut.name.startswith(f"{owner}.") for owner in routed)]
        whole = {id(m) for owner in routed for m in model.get_submodule(owner).modules()}
        rows = [m for m in blocks.modules() if isinstance(m, RowParallelLinear) and id(m) not in whole]
        region = TokenRegion(comm)
        for row in rows:
            if row.input_is_parallel:
                row.sequence_dim, row.region = 1, region
        owners = routed | _enter_owners(model, [cut for cut in inside if cut not in of_experts], region, blocks)
        share_inputs(model, of_experts)
        for owner in map(model.get_submodule, sorted(routed)):
            # it has all tokens, and returns this rank's: a router sees them all, as its loss is of the whole
            _enter(owner, "experts", region, blocks.children())
            owner.register_forward_hook(partial(_leave, region), with_kwargs=True)
            draw_inside(owner, draws)
        _sum_norms(model, name, owners, routed, region)
        blocks[0].register_forward_pre_hook(partial(_check_held, region, blocks), with_kwargs=True)
        blocks[0].register_forward_pre_hook(partial(_before, region.enter), with_kwargs=True)
        blocks[-1].register_forward_hook(partial(_after, region.leave))
        for number, block in blocks.named_children():
            draw_inside(block, draws, region.is_active)
            _within(block, f"{name}.{number}", region)
        callers = name.split(".")[:-1]
        for caller in (model.get_submodule(".".join(callers[:i])) for i in range(len(callers) + 1)):
            caller.register_forward_pre_hook(partial(_hold, region), with_kwargs=True)
            caller.register_forward_hook(partial(_release, region), always_call=True)


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
    gathered = {cut.owner for cut in cuts if cut.style == plan.COLUMN_GATHERED}
    for name in (columns.keys() | gathered) - shared:
        owner, around = model.get_submodule(name), any(other.startswith(f"{name}.") for other in columns)
        _enter(owner, ", ".join(columns[name]), region, [owner] if around else blocks.children())
    for name in gathered:  # the output of these is whole on every rank
        model.get_submodule(name).register_forward_hook(partial(_after, region.scattered))
    return columns.keys() | gathered


def _enter(owner: nn.Module, calls: str, region: TokenRegion, blocks: Iterable[nn.Module]) -> None:
    """Gather the tokens for a module that calls column layers, which is none of ``blocks``, nor around another such."""
    if any(owner is block for block in blocks):
        raise ValueError(
            f"sequence_parallel=True: {type(owner).__name__} calls {calls} itself, so "
            "that its tokens cannot enter whole there and stay cut elsewhere: this family works without"
        )
    owner.register_forward_pre_hook(partial(_before, region.gathered), with_kwargs=True)


class _Read:
    """A whole parameter of a module that has all tokens until its row layer. Read where each rank has some, be it by
    another module, or to be returned to one, it is a copy, whose gradients are summed."""

    def __init__(self, name: str, region: TokenRegion) -> None:
        self.name, self.region = name, region

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None or self.name not in module._parameters:
            raise AttributeError(self.name)
        p, region = module._parameters[self.name], self.region
        return ops.copy(p, region.comm, dtype=torch.float32) if p is not None and region.is_spread() else p


def _sum_norms(model: nn.Module, stack_name: str, owners: set[str], routed: set[str], region: TokenRegion) -> None:
    """Sum the gradients of norms, which see this rank's tokens only. Other modules might mix tokens: an error."""
    for name, module in model.get_submodule(stack_name).named_modules(prefix=stack_name):
        whole = [] if isinstance(module, ParallelModule) else [n for n, _ in module.named_parameters(recurse=False)]
        if not whole or any(f"{name}.".startswith(o + ".") for o in routed):
            continue
        if any(f"{name}.".startswith(o + ".") for o in owners):
            if SUBSTITUTED not in vars(module):
                reads = {n: _Read(n, region) for n in whole}
                module.__class__ = with_forward(type(module), type(module).forward, reads)
            continue
        if not any(word in type(module).__name__ for word in ("Norm", "Scale")):
            raise ValueError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) is whole and no norm, so that it "
                "may mix tokens of which each rank would have some: cut it, or leave sequence_parallel out"
            )
        sum_gradients(module, region.comm, region.is_active)


def check_hooks(model: nn.Module, cuts: list[Cut]) -> None:
    """Before any change: ValueError for hooks that would see this rank's tokens. All tokens are inside of the modules
    that call column layers, but for the outputs of row layers."""
    owners = tuple(f"{cut.owner}." for cut in cuts if cut.style in _WHOLE_TOKENS)
    rows = {cut.name for cut in cuts if cut.style in (plan.ROW, plan.PACKED_ROW)}
    for stack, blocks in _stacks(model, cuts):
        for name, module in blocks.named_modules(prefix=stack):
            if is_hooked(module) and (name in rows or not name.startswith(owners)):
                raise ValueError(
                    f"sequence_parallel=True: {name} ({type(module).__name__}) has hooks, which would see this rank's "
                    "tokens: register them after parallelize, for those, or leave sequence_parallel out"
                )


_WHOLE_TOKENS = (plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN, plan.COLUMN_GATHERED, plan.EXPERTS)
