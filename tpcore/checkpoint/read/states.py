"""What a load fills: a model's state, compared with a checkpoint's before anything is changed, and an optimizer's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...layout.shard import ShardSpec
from ...private import forward_pre_hooks
from ...runtime.context import ParallelContext
from ...train.zero import renumbered
from ..forms.pickles import in_own_memory, mapped
from ..forms.rank_files import in_order
from ..forms.source import OfParameter
from ..storage.files import listed
from ..stored import ReadPlan, Stored, layout_of
from ..tree import is_optimizer

_COMPILED = "_orig_mod."
"""What torch.compile puts before the names of the module that it compiles."""
_EXTRA_STATE = "_extra_state"  # torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass(frozen=True)
class TensorRead:
    """A row of the list that a load reads: ``plan`` fills ``out``. ``in_place``: it is the model's own memory. One
    on meta stands for the tensor, of which a ``Zero1`` reads its own entries."""

    name: str
    plan: ReadPlan
    out: Tensor
    in_place: bool = False


class ModelState:
    """The entries of a model's ``state_dict()`` with their layouts, and what ``compare`` finds for them in a file.
    Parameters and buffers are filled in place; those on meta get memory on the context's device, and ``assign`` puts it
    into the model and keeps ties. Floats are converted to the model's dtype."""

    def __init__(self, module: nn.Module, ctx: ParallelContext) -> None:
        self.module, self._ctx = module, ctx
        self.entries: dict[str, Any] = dict(module.state_dict(keep_vars=True))
        self.layouts: dict[str, Layout] = {}
        for name, t in self.entries.items():
            if isinstance(t, Tensor):
                self.layouts[name] = layout_of(t, ctx, f"the model's {name!r}") or Layout(tuple(t.shape))
        self._owned = {id(t) for t in (*module.parameters(), *module.buffers())}
        self._rows: dict[int, TensorRead] = {}  # by the model's tensor
        self._others: dict[str, Any] = {}  # what the module's load_state_dict takes

    def spec_of(self, name: str, shape: tuple[int, ...] = (), m: int = 1) -> ShardSpec | None:
        """How a tensor is sharded, for files that do not record it."""
        layout = self.layouts.get(name)
        return layout.cuts[0].spec if layout is not None and layout.cuts and layout.cuts[0].axes != ("ep",) else None

    # -- comparing ----------------------------------------------------------------------------------------
    def compare(self, saved: Mapping[str, Any], where: str, *, strict: bool) -> tuple[list[TensorRead], list[str]]:
        """What is to be read of ``saved``, and warnings. CheckpointError lists what does not fit."""
        both = [name for name in self.entries if name in saved]
        tied = {id(self.entries[name]) for name in both}  # a tied tensor may be stored under one name only
        missing = [n for n, t in self.entries.items() if n not in saved and id(t) not in tied]
        extra = [name for name in saved if name not in self.entries]
        absent = [f"{n!r}: the model has {_shape(self.entries[n])}, the checkpoint nothing" for n in missing]
        absent += [f"{n!r}: the checkpoint has {_shape(saved[n])}, the model nothing" for n in extra]
        wrong: list[str] = []
        for name in both:
            t, extra_state = self.entries[name], name.rpartition(".")[2] == _EXTRA_STATE
            if extra_state:
                continue
            if isinstance(t, Tensor):
                wrong += misfits(name, saved[name], self.layouts[name], t.dtype, self._ctx.mesh)
            elif isinstance(saved[name], Stored):
                wrong.append(f"{name!r}: the checkpoint has {_shape(saved[name])}, the model {_shape(t)}")
        if wrong or (strict and absent):
            compiled = {n.replace(_COMPILED, "") for n in missing} & {n.replace(_COMPILED, "") for n in extra}
            remedy = f" (names differ by torch.compile's {_COMPILED!r}: save and load the module that it has there)"
            what = f"{where} does not fit the model{remedy if compiled else ''}"
            raise CheckpointError(listed(what, wrong + absent if strict else wrong))
        notes = [listed(f"{where} does not fit the model everywhere, and strict=False", absent)] if absent else []
        for name in both:
            self._add(name, saved[name])
        rows = [*self._rows.values()]
        lines = []
        for row in rows:
            have, want = row.plan.stored.dtype, row.out.dtype
            if have != want and have.itemsize >= want.itemsize:
                lines.append(f"{row.name!r}: from {have} to the model's {want}")
        notes += [listed("tensors lose precision", lines)] if lines else []
        return rows, notes

    def _add(self, name: str, stored: Any) -> None:
        t = self.entries[name]
        if not isinstance(stored, Stored) or not isinstance(t, Tensor):
            self._others[name] = stored
            return
        plan = stored.plan(self.layouts[name], self._ctx.rank, self._ctx.mesh)
        if (known := self._rows.get(id(t))) is not None:
            same = stored.first.identity == known.plan.stored.first.identity
            if not same and not torch.equal(plan.tensor(t.dtype), known.plan.tensor(t.dtype)):
                raise CheckpointError(f"{name!r} and {known.name!r} are one tensor in the model, two in the checkpoint")
            return
        in_place = id(t) in self._owned and not t.is_meta
        device = self._ctx.device if t.is_meta else torch.device("cpu")
        out = t if in_place else torch.empty(t.shape, dtype=t.dtype, device=device)
        self._rows[id(t)] = TensorRead(name, plan, out, in_place)

    # -- changing -----------------------------------------------------------------------------------------
    def assign(self) -> list[str]:
        """Assign what was made outside of the model, which no fault of the checkpoint can fail. Returns warnings."""
        parameters: dict[int, Tensor] = {}
        made: dict[str, Tensor] = {}
        for name, t in self.entries.items():
            if id(t) not in self._rows or not isinstance(t, Tensor):
                continue
            out = self._rows[id(t)].out
            if t.is_meta:
                if isinstance(t, nn.Parameter):  # one Parameter for all its names, so that it stays tied
                    out = parameters.setdefault(id(t), nn.Parameter(out, requires_grad=t.requires_grad))
                made[name] = out
            elif id(t) not in self._owned:
                self._others[name] = out
        if made:
            self.module.load_state_dict(made, strict=False, assign=True)
        if self._others:  # extra state, and entries that a state_dict hook of the model adds
            self.module.load_state_dict(self._others, strict=False)
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        left = [repr(name) for name, t in tensors if t.is_meta]
        if not left:
            return []
        for name, module in self.module.named_modules():  # torch may compute with them, without an error
            if _on_meta(module):
                module.register_forward_pre_hook(_WithoutValues(name or type(module).__name__))
        return [listed("still on meta, because the checkpoint does not hold them", left)]


def misfits(name: str, stored: Any, want: Layout, dtype: torch.dtype, mesh: Mesh) -> Iterator[str]:
    """Why what is stored, if anything, cannot be loaded into a model's tensor of layout ``want`` on ``mesh``."""
    if not isinstance(stored, Stored):
        kind = "nothing" if stored is None else f"a {type(stored).__name__}"
        yield f"{name!r}: the model has shape {want.shape}, the checkpoint {kind}"
    elif not stored.kept(want, mesh) and stored.shape != want.shape:
        cut = "" if not want.cuts else f", of which this rank holds {want.local_shape(mesh)}"
        yield f"{name!r}: the checkpoint has shape {stored.shape}, the model {want.shape}{cut}"
    elif stored.dtype != dtype and not (
        stored.dtype.is_floating_point and dtype.is_floating_point and dtype.itemsize > 1  # float8 would need a scale
    ):
        yield f"{name!r}: the checkpoint has dtype {stored.dtype}, the model {dtype}"


def _shape(value: Any) -> str:
    if isinstance(value, (Tensor, Stored)):
        return f"shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def aligned(saved: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    """``saved`` under the model's names, if the names on one side have a prefix more, as ``bert.`` with a head."""
    if not wanted or not saved or wanted & saved.keys():
        return dict(saved)
    if (prefix := _prefix(saved, wanted)) is not None:
        return {name.removeprefix(prefix): item for name, item in saved.items()}
    prefix = _prefix(wanted, saved) or ""
    return {prefix + name: item for name, item in saved.items()}


def _prefix(names: Collection[str], without: Collection[str]) -> str | None:
    """What stands in ``names`` before each of ``without``, if it is the same before all."""
    shortest = min(without, key=lambda name: (len(name), name))
    prefixes = (name.removesuffix(shortest) for name in names if name.endswith(f".{shortest}"))
    return next((p for p in prefixes if all(p + name in names for name in without)), None)


def _on_meta(module: nn.Module) -> list[str]:
    return [name for name, t in module.named_buffers(recurse=False) if t.is_meta]


@dataclass(frozen=True)
class _WithoutValues:
    """A hook that removes itself once all buffers have values. It holds no module: it is copied with its own."""

    where: str

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        left = _on_meta(module)
        if left:
            names = ", ".join(f"{self.where}.{name}" for name in left)
            raise ValueError(
                f"{names} {'has' if len(left) == 1 else 'have'} no values: on meta since the model was made there, and "
                "in no checkpoint. Set them before the first forward, or make what owns them with torch.device('cpu')"
            )
        hooks = forward_pre_hooks(module)
        for key in [key for key, hook in hooks.items() if hook is self]:
            del hooks[key]


def parameter_layouts(
    optimizer: torch.optim.Optimizer, ctx: ParallelContext, model: nn.Module | None
) -> tuple[dict[int, Layout | None], list[str] | None]:
    """By number; and the parameters' names in order, of their own or in ``model``, if all have one."""
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    names = [*chain.from_iterable(group.get("param_names") or () for group in optimizer.param_groups)]
    layouts = {i: layout_of(p, ctx, f"parameter {i}") for i, p in enumerate(params)}
    if len(names) != len(params) and model is not None:
        known = {id(p): name for name, p in model.named_parameters()}
        names = [known[id(p)] for p in params if id(p) in known]
    return layouts, names if len(names) == len(params) else None


def layouts_here(
    tensors: Sequence[OfParameter], by_name: Mapping[str, Layout], by_number: Mapping[int, Layout | None]
) -> tuple[dict[Stored, Layout], set[Any]]:
    """The layouts of optimizers' ``tensors`` on this mesh, each that of its parameter; and the keys of optimizers with
    a tensor whose parameter is not known."""
    layouts: dict[Stored, Layout] = {}
    unknown = set()
    for of in tensors:
        want = by_name.get(of.name) if by_name and of.name else by_number.get(of.number)
        if want is not None and isinstance(of.stored.layout, Layout):
            if of.stored.layout.shape == want.shape:
                layouts[of.stored] = want
        elif of.stored.first.shape:
            unknown.add(of.key)
    return layouts, unknown


def state_here(
    states: Sequence[Mapping[str, Any]],
    optimizer: Any,
    ctx: ParallelContext,
    where: str,
    memory: Callable[[Stored, Layout | None], Tensor] | None = None,
) -> dict[str, Any]:
    """The state of ``optimizer`` on this rank, from the saved states of ``len(states)`` ranks. A saved value is sharded
    like the parameter of its number. ``memory``: for what is stored, in the layout that is wanted; None: it is read.
    CheckpointError if groups or shapes are not those of this optimizer."""
    for state in states:
        if not is_optimizer(state):
            raise CheckpointError(f"{where} has no optimizer's state there, but {list(state)[:8]}")
    read = memory or (lambda stored, layout: stored.plan(layout, ctx.rank, ctx.mesh).tensor())
    states = [renumbered(state, optimizer.param_groups, {}) for state in states]
    first = states[0]
    saved, here = ([group["params"] for group in groups] for groups in (first["param_groups"], optimizer.param_groups))
    sizes, wanted = [*map(len, saved)], [*map(len, here)]
    if sizes != wanted:
        raise CheckpointError(f"{where}: the saved optimizer has groups of {sizes} parameters, this one of {wanted}")
    params = dict(zip(chain(*saved), chain(*here), strict=True))
    new: dict[Any, Any] = {}
    for index, values in first["state"].items():
        if index not in params or any(s["state"].get(index, {}).keys() != values.keys() for s in states):
            raise CheckpointError(f"{where}: the ranks hold different states of parameter {index}")
        want = layout_of(params[index], ctx, f"parameter {index}")
        new[index] = {
            key: read(*_stored([s["state"][index][key] for s in states], want, f"{where}: state[{index}].{key}"))
            if isinstance(value, Tensor)
            else value
            for key, value in values.items()
        }
    return {"state": new, "param_groups": in_own_memory(first["param_groups"])}


def _stored(values: list[Any], layout: Layout | None, where: str) -> tuple[Stored, Layout | None]:
    """One value of a parameter's state. A tensor that has not the shape of the parameter's shard is not sharded."""
    m, shards = len(values), [mapped(value, "state", where) for value in values]
    spec = layout.cuts[0].spec if layout is not None and layout.cuts and layout.cuts[0].axes != ("ep",) else None
    if spec is not None and {s.shape for s in shards} == {spec.local_shape(m)}:
        shards = in_order(shards, spec, where)
    else:
        spec = layout = None
    return Stored.over_tp(where, spec, m, None, shards.__getitem__), layout
