"""Loads a checkpoint's state into a model. Everything is compared before the model is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layout.layout import Layout
from ...layout.mesh import Mesh
from ...runtime.context import ParallelContext
from ..storage.files import listed
from ..stored import ReadPlan, Stored, layout_of

_COMPILED = "_orig_mod."
"""What torch.compile puts before the names of the module that it compiles."""
_EXTRA_STATE = "_extra_state"  # torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


class Fit:
    """Loads a state into a model. The constructor compares them. Then call ``verify``, ``run`` and ``finish``, each on
    all ranks. Parameters and buffers are filled in place; those on meta get memory on the context's device, and
    ``finish`` assigns them and keeps ties. Floats are converted to the model's dtype."""

    def __init__(
        self, model: nn.Module, saved: Mapping[str, Any], ctx: ParallelContext, where: str, *, strict: bool
    ) -> None:
        self._model, self._ctx = model, ctx
        self._wanted = dict(model.state_dict(keep_vars=True))
        self.names = list(self._wanted)
        self._owned = {id(t) for t in (*model.parameters(), *model.buffers())}
        # by the model's tensor: what to fill, and whether that is the tensor itself
        self._reads: dict[int, tuple[str, ReadPlan, Tensor, bool]] = {}
        self._layouts: dict[str, Layout] = {}  # for the model's tensors that the checkpoint has
        self._hand_over: dict[str, Any] = {}
        self._notes: list[str] = []
        self._compare(saved, where, strict)

    # -- comparing ----------------------------------------------------------------------------------------
    def _compare(self, saved: Mapping[str, Any], where: str, strict: bool) -> None:
        both = [name for name in self._wanted if name in saved]
        tied = {id(self._wanted[name]) for name in both}  # a tied tensor may be stored under one name only
        missing = [n for n, t in self._wanted.items() if n not in saved and id(t) not in tied]
        extra = [name for name in saved if name not in self._wanted]
        absent = [f"{n!r}: the model has {_shape(self._wanted[n])}, the checkpoint nothing" for n in missing]
        absent += [f"{n!r}: the checkpoint has {_shape(saved[n])}, the model nothing" for n in extra]
        wrong: list[str] = []
        for name in both:
            t, extra_state = self._wanted[name], name.rpartition(".")[2] == _EXTRA_STATE
            if isinstance(t, Tensor):
                layout = layout_of(t, self._ctx, f"the model's {name!r}") or Layout(tuple(t.shape))
                self._layouts[name] = layout
                if not extra_state:
                    wrong += misfits(name, saved[name], layout, t.dtype, self._ctx.mesh)
            elif isinstance(saved[name], Stored) and not extra_state:
                wrong.append(f"{name!r}: the checkpoint has {_shape(saved[name])}, the model {_shape(t)}")
        if wrong or (strict and absent):
            compiled = {n.replace(_COMPILED, "") for n in missing} & {n.replace(_COMPILED, "") for n in extra}
            remedy = f" (names differ by torch.compile's {_COMPILED!r}: save and load the module that it has there)"
            what = f"{where} does not fit the model{remedy if compiled else ''}"
            raise CheckpointError(listed(what, wrong + absent if strict else wrong))
        if absent:
            self._notes.append(listed(f"{where} does not fit the model everywhere, and strict=False", absent))
        for name in both:
            self._plan(name, saved[name])
        dtypes = [(name, plan.dtype, out.dtype) for name, plan, out, _ in self._reads.values()]
        lossy = [(n, have, want) for n, have, want in dtypes if have != want and have.itemsize >= want.itemsize]
        lines = [f"{name!r}: from {have} to the model's {want}" for name, have, want in lossy]
        self._notes += [listed("tensors lose precision", lines)] if lines else []

    def _plan(self, name: str, stored: Any) -> None:
        t = self._wanted[name]
        if not isinstance(stored, Stored) or not isinstance(t, Tensor):
            self._hand_over[name] = stored
            return
        plan = stored.plan(self._layouts[name], self._ctx.rank, self._ctx.mesh)
        if id(t) in self._reads:
            other, known, *_ = self._reads[id(t)]
            same = stored.first.identity == known.stored.first.identity
            if not same and not torch.equal(plan.tensor(t.dtype), known.tensor(t.dtype)):
                raise CheckpointError(f"{name!r} and {other!r} are one tensor in the model, two in the checkpoint")
            return
        in_place = id(t) in self._owned and not t.is_meta
        device = self._ctx.device if t.is_meta else torch.device("cpu")
        out = t if in_place else torch.empty(t.shape, dtype=t.dtype, device=device)
        self._reads[id(t)] = name, plan, out, in_place

    # -- changing -----------------------------------------------------------------------------------------
    def verify(self) -> None:
        """Compare the checksums of shards that ``run`` reads straight into the model."""
        for _, plan, _, in_place in self._reads.values():
            if in_place:
                plan.verify()

    def run(self) -> None:
        for _, plan, out, in_place in self._reads.values():
            plan.fill(out, check=not in_place)

    def finish(self) -> list[str]:
        """Assign what was made outside of the model, which no fault of the checkpoint can fail. Returns warnings."""
        parameters: dict[int, Tensor] = {}
        assign: dict[str, Tensor] = {}
        for name, t in self._wanted.items():
            if id(t) not in self._reads or not isinstance(t, Tensor):
                continue
            out = self._reads[id(t)][2]
            if t.is_meta:
                if isinstance(t, nn.Parameter):  # one Parameter for all its names, so that it stays tied
                    out = parameters.setdefault(id(t), nn.Parameter(out, requires_grad=t.requires_grad))
                assign[name] = out
            elif id(t) not in self._owned:
                self._hand_over[name] = out
        if assign:
            self._model.load_state_dict(assign, strict=False, assign=True)
        if self._hand_over:  # extra state, and entries that a state_dict hook of the model adds
            self._model.load_state_dict(self._hand_over, strict=False)
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        left = [repr(name) for name, t in tensors if t.is_meta]
        if left:
            self._notes.append(listed("still on meta, because the checkpoint does not hold them", left))
            for name, module in self._model.named_modules():  # torch may compute with them, without an error
                if _on_meta(module):
                    module.register_forward_pre_hook(_Refusing(name or type(module).__name__))
        return self._notes


def misfits(name: str, stored: Any, want: Layout, dtype: torch.dtype, mesh: Mesh) -> Iterator[str]:
    """Why what is stored, if anything, cannot be loaded into a model's tensor of layout ``want`` on ``mesh``."""
    if not isinstance(stored, Stored):
        kind = "nothing" if stored is None else f"a {type(stored).__name__}"
        yield f"{name!r}: the model has shape {want.shape}, the checkpoint {kind}"
    elif not stored.kept(want, mesh) and stored.shape != want.shape:
        cut = "" if not want.cuts else f", of which this rank holds {want.local_shape(mesh)}"
        yield f"{name!r}: the checkpoint has shape {stored.shape}, the model {want.shape}{cut}"
    elif stored.dtype != dtype and not (stored.dtype.is_floating_point and _takes_casts(dtype)):
        yield f"{name!r}: the checkpoint has dtype {stored.dtype}, the model {dtype}"


def _takes_casts(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1  # float8 would need a scale


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
class _Refusing:
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
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is self]:
            del module._forward_pre_hooks[key]
