"""Sequence parallelism: between the cut regions of a block each rank keeps some of the tokens.

Activations are ``[batch, tokens, features]``, cut along dim 1. The modules that call column layers, attention
and MLP, get all tokens, not only the layers inside: an attention's views read the number of tokens.
Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..layers import RowParallelLinear
from ..layers.module import ParallelModule
from ..train.pipeline import PipelinedLayers
from . import plan
from .cuts import Cut
from .forwards import Draws, columns_by_owner, draw_inside, share_inputs, sum_gradients

Map = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class Stack:
    """A list of blocks, and whether tokens are cut in the current forward: if tp divides their number, which is the
    same on every rank. So they stay whole when single tokens are generated."""

    comm: Comm
    rows: list[RowParallelLinear]
    blocks: nn.ModuleList | PipelinedLayers
    active: bool = False
    allowed: bool = True
    """False if the caller wants the hidden states between the blocks: this rank would have only a part."""

    def enter(self, tokens: Tensor) -> Tensor:
        n = self.comm.size
        self.active = self.allowed and tokens.ndim == 3 and tokens.shape[1] % n == 0
        recomputed = any(getattr(block, "gradient_checkpointing", False) for block in self.blocks.children())
        if not self.active and recomputed and self.blocks.training and torch.is_grad_enabled():
            # the recomputation in backward could not know whether its forward cut the tokens
            raise ValueError(
                f"sequence parallelism with activation checkpointing needs a number of tokens that tp={n} "
                f"divides, and no hidden states as output, not tokens of {tuple(tokens.shape)}: pad the "
                f"batch to a multiple of {n}"
            )
        for row in self.rows:
            row.sequence_dim = 1 if self.active else None
        return self.scatter(tokens)

    def __call__(self) -> bool:
        return self.active

    def gather(self, tokens: Tensor) -> Tensor:
        """Chunks -> replicated, for work that is the same on each rank."""
        return ops.gather(tokens, self.comm, 1) if self.active else tokens

    def scatter(self, tokens: Tensor) -> Tensor:
        return ops.scatter(tokens, self.comm, 1) if self.active else tokens

    def copy(self, x: Tensor) -> Tensor:
        """The input of column layers: tokens are gathered from the ranks if they are cut."""
        if self.active:
            return ops.all_gather(x, self.comm, 1, dtype=torch.float32)
        return ops.copy(x, self.comm, dtype=torch.float32)


def _before(change: Map, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook that changes a module's hidden states, its first argument."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _after(change: Map, module: nn.Module, args: Any, output: Any) -> Any:
    """A hook that changes a module's hidden states, its first output."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _leave(stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """A hook that keeps this rank's tokens of a first output, be it ``[batch * tokens, features]``."""
    entered = args[0] if args else kwargs["hidden_states"]
    return _after(lambda tokens: stack.scatter(tokens.reshape(entered.shape)), module, args, output)


def _note_outputs(stacks: list[Stack], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook that notes whether the caller wants outputs from between the blocks."""
    names = ("output_hidden_states", "output_attentions")
    wanted = any(kwargs.get(n, getattr(model.config, n, False)) for n in names)
    for stack in stacks:
        stack.allowed = not wanted


def cut_sequence(model: nn.Module, cuts: list[Cut], comm: Comm, draws: Draws) -> None:
    """Cut the tokens between the blocks of every stack that has cut layers."""
    if getattr(model.config, "layerdrop", 0) or getattr(model.config, "decoder_layerdrop", 0):
        raise ValueError("sequence_parallel=True: with layerdrop the last block may not run; set it to 0")
    stacks = []
    for name, blocks in _stacks(model, cuts):
        inside = [cut for cut in cuts if cut.name.startswith(name + ".")]
        routed = {cut.owner for cut in inside if cut.style == plan.EXPERTS}
        of_experts = [cut for cut in inside if any(cut.name.startswith(f"{owner}.") for owner in routed)]
        whole = {id(m) for owner in routed for m in model.get_submodule(owner).modules()}
        rows = [m for m in blocks.modules() if isinstance(m, RowParallelLinear) and id(m) not in whole]
        stack = Stack(comm, [row for row in rows if row.input_is_parallel], blocks)
        owners = routed | _enter_owners(model, [cut for cut in inside if cut not in of_experts], stack)
        share_inputs(model, of_experts)
        for owner in map(model.get_submodule, sorted(routed)):
            # it has all tokens, and returns this rank's: a router sees them all, as its loss is of the whole
            _enter(owner, "experts", stack)
            owner.register_forward_hook(partial(_leave, stack), with_kwargs=True)
            draw_inside(owner, draws)
        _sum_norms(model, name, owners, stack)
        blocks[0].register_forward_pre_hook(partial(_before, stack.enter), with_kwargs=True)
        blocks[-1].register_forward_hook(partial(_after, stack.gather))
        for block in blocks.children():
            draw_inside(block, draws, stack)
        stacks.append(stack)
    model.register_forward_pre_hook(partial(_note_outputs, stacks), with_kwargs=True)


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


def _enter_owners(model: nn.Module, cuts: list[Cut], stack: Stack) -> set[str]:
    """Gather the tokens at the modules that call column layers; return the names of those modules."""
    columns = columns_by_owner(model, cuts)
    shared = share_inputs(model, cuts, stack.copy)
    gathered = {cut.owner for cut in cuts if cut.style == plan.COLUMN_GATHERED}
    for name in (columns.keys() | gathered) - shared:
        _enter(model.get_submodule(name), ", ".join(columns[name]), stack)
    for name in gathered:  # the output of these is whole on every rank
        model.get_submodule(name).register_forward_hook(partial(_after, stack.scatter))
    return columns.keys() | gathered


def _enter(owner: nn.Module, calls: str, stack: Stack) -> None:
    if any(owner is block for block in stack.blocks.children()):
        raise ValueError(
            f"sequence_parallel=True: {type(owner).__name__} calls {calls} itself, so "
            "that its tokens cannot enter whole there and stay cut elsewhere: this family works without"
        )
    owner.register_forward_pre_hook(partial(_before, stack.gather), with_kwargs=True)


def _sum_norms(model: nn.Module, stack_name: str, owners: set[str], stack: Stack) -> None:
    """Sum the gradients of norms, which see this rank's tokens only. Other modules might mix tokens: an error."""
    for name, module in model.named_modules():
        outside = not name.startswith(stack_name + ".") or any(f"{name}.".startswith(o + ".") for o in owners)
        whole = list(module.parameters(recurse=False))
        if outside or isinstance(module, ParallelModule) or not whole:
            continue
        if not any(word in type(module).__name__ for word in ("Norm", "Scale")):
            raise ValueError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) is whole and no norm, so that it "
                "may mix tokens of which each rank would have some: cut it, or leave sequence_parallel out"
            )
        sum_gradients(module, stack.comm, stack)
