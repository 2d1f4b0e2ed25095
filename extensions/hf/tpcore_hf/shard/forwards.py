"""Forwards on a rank: inputs copied once, dropout that differs between ranks, summed gradients, parameters by heads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpcore.comm import mappings as ops
from tpcore.comm.blocks import copies
from tpcore.comm.comm import Comm
from tpcore.layers import ColumnParallelLinear, RowParallelLinear, share_input
from tpcore.layers.adopt import HOOKED
from tpcore.layout.shard import Block
from tpcore.runtime.random import sharded

from ..plan import rules as plan
from ..plan.decisions import Cut
from ..plan.inputs import argument_of_calls
from ..plan.rules import REPLICATE, Rule, rule_of

_REGION, SUBSTITUTED, _OWN, _BLOCKS = "_tpcore_region", "_tpcore_summed", "_tpcore_forward", "_tpcore_blocks"
Switch = Callable[[], bool]
"""Whether gradients are in parts in the current forward."""
_DROPOUTS = frozenset(
    f"{kind}{suffix}"
    for kind in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_", "1d", "2d", "3d")
)
_COLUMNS = (plan.COLUMN, plan.PACKED_COLUMN, plan.QKV_COLUMN)


class Draws(TorchFunctionMode):
    """Functions that drop elements draw from the sharded stream while the data differ between the tp ranks. A mode sees
    functions inside attention like modules, and torch.compile traces it. It is entered in the forward itself, so that a
    recomputation passes through it too."""

    sharded = False
    """Whether the data are this rank's part: from a column layer to the next row layer."""

    def __init__(self, compiled: bool) -> None:
        """``compiled``: whether compiled forwards drop; dynamo cannot trace a sharded Parameter in a mode."""
        super().__init__()
        self.compiled = compiled

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.sharded or not _draws(getattr(func, "__name__", ""), args, kwargs):
            return func(*args, **kwargs)
        with sharded():
            return func(*args, **kwargs)


def _draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call of the function ``name`` draws random numbers: another leaves the stream where it is."""
    if name in _DROPOUTS:
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        train = args[2] if len(args) > 2 else True
        return bool(p) and bool(kwargs.get("training", kwargs.get("train", train)))
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return name in ("bernoulli", "bernoulli_")


def _note(draws: Draws, layer: Any, args: Any, output: Any) -> None:
    """A hook of a parallel layer: whether its output is this rank's part."""
    row = isinstance(layer, RowParallelLinear)
    draws.sharded = layer.tokens_dim is not None if row else not layer.gather_output


def drop_by_rank(model: nn.Module, cuts: list[Cut], rules: Mapping[str, Rule]) -> Draws:
    """Let dropout between column and row layers differ between the tp ranks, in each module that calls column
    layers; in modules inside it that ``rules`` leave whole, it is replicated."""
    draws = Draws(_drops(model))
    for cut in cuts:
        layer = model.get_submodule(cut.name)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
            layer.register_forward_hook(partial(_note, draws), prepend=True)  # other hooks may drop too
    owners = columns_by_owner(model, cuts).keys()
    for name, module in list(model.named_modules()):
        inside = any(name.startswith(f"{owner}.") for owner in owners)
        if name in owners or (inside and rule_of(name, rules) == REPLICATE):
            draw_inside(module, draws)
    return draws


def _drops(model: nn.Module) -> bool:
    """Whether a dropout is on, by the names of options, all that configurations and modules have in common: a compiled
    forward cannot ask each call."""
    options = [vars(module) for module in model.modules()]
    options += [vars(m.config) for m in model.modules() if hasattr(getattr(m, "config", None), "__dict__")]
    numbers = (v for o in options for k, v in o.items() if "drop" in k and isinstance(v, int | float))
    return any(numbers) or any(getattr(m, "p", 0) for m in model.modules() if "Drop" in type(m).__name__)


def draw_inside(module: nn.Module, draws: Draws, spread: Switch | None = None) -> None:
    """Enter ``draws`` in each forward of ``module``. ``spread``: whether its input is this rank's part."""
    original, own = own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # children too, as people turn on dropout alone
        if not (self.training or any(child.training for child in self.children())):
            return own(self, *args, **kwargs)
        draws, spread = self.__dict__[_REGION]
        if torch.compiler.is_compiling() and not draws.compiled:
            return own(self, *args, **kwargs)
        before = draws.sharded
        draws.sharded = spread is not None and spread()
        try:
            with draws:
                return own(self, *args, **kwargs)
        finally:
            draws.sharded = before

    module.__dict__[_REGION] = draws, spread
    module.__class__ = with_forward(original, forward)


def columns_by_owner(model: nn.Module, cuts: list[Cut]) -> dict[str, dict[str, ColumnParallelLinear]]:
    """The column layers whose outputs stay parts: by the name of their owner, then by their name in it."""
    columns: dict[str, dict[str, ColumnParallelLinear]] = defaultdict(dict)
    for cut in cuts:
        layer = model.get_submodule(cut.name)
        if cut.style in _COLUMNS and isinstance(layer, ColumnParallelLinear):
            columns[cut.owner][cut.name.removeprefix(f"{cut.owner}.")] = layer
    return columns


def share_inputs(model: nn.Module, cuts: list[Cut], copy: Callable[[Tensor], Tensor] | None = None) -> set[str]:
    """Copy inputs once in the modules of which only the column layers read them; return these modules' names."""
    done = set()
    for name, columns in columns_by_owner(model, cuts).items():
        owner = model.get_submodule(name)
        argument = argument_of_calls(owner, set(columns))
        if any(HOOKED in vars(column) for column in columns.values()):
            continue  # what a hook adds to the gradient of the input is no part of a sum
        if argument is not None and (copy is not None or len(columns) > 1):
            share_input(owner, *columns.values(), argument=argument, copy=copy)
            done.add(name)
    return done


def _summed(comm: Comm, switch: Switch | None, parameter: Tensor | None) -> Tensor | None:
    """``ops.copy`` of a parameter: the backward of each use sums the ranks' gradients. A hook on the accumulated
    gradient would sum earlier ones again."""
    if parameter is None or not (switch is None or switch()):
        return parameter
    return ops.copy(parameter, comm, dtype=torch.float32)


def _of_heads(comm: Comm, copies: int, parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a tensor with an entry for each head, which ``copies`` ranks have; the backward gathers."""
    return None if parameter is None else ops.scatter(parameter.repeat_interleave(copies, 0), comm, 0)


def sum_gradients(module: nn.Module, comm: Comm, switch: Switch | None = None, heads: Sequence[Block] = ()) -> None:
    """Sum the gradients of ``module``'s own parameters, not its children's, over ``comm``, in forwards in which
    ``switch`` is on, where its input has this rank's tokens along dim 1; without a switch, the ``heads`` of a rank,
    as they are in the features of the layers around it, or tokens along dim -2."""
    if comm.blocks is not None:
        tokens = -2 if switch is None else 1
        sum_in_blocks(module, comm, partial(dim_of_heads, heads) if heads else lambda x: tokens, switch)
        return
    substitute(module, partial(_summed, comm, switch))


def dim_of_heads(blocks: Sequence[Block], x: Tensor) -> int:
    """Along which ``x`` has a rank's heads, before or after they are transposed: their number tells, and in memory they
    are nearer to each other than tokens that are as many."""
    numbers = {n for block in blocks for n in (block.size // block.unit, block.size / x.shape[-1])}
    found = [dim for dim in range(max(0, x.ndim - 3), x.ndim - 1) if x.shape[dim] in numbers]
    if not found:
        raise ValueError(
            f"an input of shape {tuple(x.shape)} has no dim of the {', '.join(f'{n:g}' for n in sorted(numbers))} "
            "heads of a rank, in whose order reproducible= adds the gradient of a parameter of all heads: leave the "
            "module whole, plan={...: 'replicate'}, or reproducible out"
        )
    return min(found, key=x.stride)


def sum_in_blocks(module: nn.Module, comm: Comm, dim_of: Callable[[Tensor], int], switch: Switch | None = None) -> None:
    """As ``sum_gradients``, in blocks of the input along a dim, tokens or heads, that are the same at every degree.
    ``module`` computes each of these by itself."""
    original, own = own_forward(module)

    def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        comm, dim_of, switch = self.__dict__[_BLOCKS]
        if switch is not None and not switch():
            return own(self, x, *args, **kwargs)
        dim = dim_of(x)
        count = x.shape[dim] & -x.shape[dim]  # of heads, as many as a tree divides
        count = comm.blocks if switch is not None else count
        spec = comm, None, torch.float32
        of_blocks = {n: copies(p, spec, count) for n, p in self._parameters.items() if p is not None}
        table, outputs = self._parameters, []
        try:
            for i, block in enumerate(x.chunk(count, dim)):
                self.__dict__["_parameters"] = {**table, **{n: of[i] for n, of in of_blocks.items()}}
                outputs.append(own(self, block.contiguous(), *args, **kwargs))
        finally:
            self.__dict__["_parameters"] = table
        return torch.cat(outputs, dim)

    module.__dict__[_BLOCKS] = comm, dim_of, switch
    module.__class__ = with_forward(original, forward)


def select_heads(module: nn.Module, comm: Comm, copies: int) -> None:
    """Let ``module`` use this rank's heads of its own parameters, and of its list of one module per head."""
    substitute(module, partial(_of_heads, comm, copies))


def substitute(module: nn.Module, function: partial[Tensor | None]) -> None:
    """Let ``module``'s forward use what ``function`` makes of the parameters. By a class with its data on the instance,
    so that ``deepcopy`` copies both together."""
    original, own = own_forward(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # not functional_call: it calls the module, whose hooks would run a second time
        saved = []
        try:
            for module, table, values in _substitutes(self):
                saved.append((module, table, module.__dict__[table]))
                module.__dict__[table] = values
            return own(self, *args, **kwargs)
        finally:
            for module, table, values in saved:
                module.__dict__[table] = values

    module.__dict__[SUBSTITUTED] = function
    module.__class__ = with_forward(original, forward)


def own_forward(module: nn.Module) -> tuple[type[nn.Module], Callable[..., Any]]:
    """The class of ``module``, and its forward as a function of a module: one that was set on ``module`` would hide
    that of a class, and is moved out of the way."""
    original = type(module)
    if "forward" not in vars(module):
        return original, original.forward
    vars(module)[_OWN] = vars(module).pop("forward")
    return original, lambda self, *args, **kwargs: vars(self)[_OWN](*args, **kwargs)


def with_forward(
    original: type[nn.Module], forward: Callable[..., Any], also: Mapping[str, Any] | None = None
) -> type[nn.Module]:
    """A subclass of ``original`` with its name and signature, another ``forward``, and what is given ``also``."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, **(also or {})}
    return type(original.__name__, (original,), {**names, "forward": wraps(original.forward)(forward)})


def _substitutes(module: nn.Module) -> Iterator[tuple[nn.Module, str, dict[str, Any]]]:
    """(module, its table of parameters or of children, what stands there in a forward)."""
    function = module.__dict__[SUBSTITUTED]
    yield module, "_parameters", {name: function(p) for name, p in module._parameters.items()}
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    for of_heads in lists if function.func is _of_heads else ():
        heads = list(of_heads.children())
        names = [name for name, _ in heads[0].named_parameters()]
        local = {name: function(torch.stack([e.get_parameter(name) for e in heads])) for name in names}
        local_heads = heads[: len(local[names[0]])]
        yield of_heads, "_modules", {str(i): element for i, element in enumerate(local_heads)}
        for i, element in enumerate(local_heads):
            yield element, "_parameters", {**element._parameters, **{n: t[i] for n, t in local.items()}}


def go_around(projection: nn.Module, attention: nn.Module, comm: Comm) -> None:
    """Sum the gradient of the rotary key, the last features of ``projection``, which the heads of all ranks share. The
    other features, the latent ones, meet a sharded layer that sums theirs (DeepSeek-V2, arXiv:2405.04434)."""
    width: Any = getattr(attention, "qk_rope_head_dim", None)  # 0 in a layer without positions
    width = attention.config.qk_rope_head_dim if width is None else width  # type: ignore[union-attr]
    projection.register_forward_hook(Rotary(comm, int(width)))


@dataclass(frozen=True)
class Rotary:
    comm: Comm
    width: int

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        latent, rotary = output.split([output.shape[-1] - self.width, self.width], -1)
        return torch.cat([latent, ops.copy(rotary, self.comm, dtype=torch.float32)], -1)


def share_identity(expert: nn.Module, comm: Comm) -> None:
    """Let an expert that returns its input return a rank's share of it: the outputs of all ranks are summed."""
    expert.register_forward_pre_hook(partial(_share, comm.size))


def _share(ranks: int, expert: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0] / ranks, *args[1:]
