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
from ..tensors.stored import ReadPlan, Stored, layout_of

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
        self._reads: dict[int, tuple[str, ReadPlan, Tensor]] = {}  # what to fill by which plan, by the model's tensor
        self._layouts: dict[str, Layout] = {}  # for the model's tensors that the checkpoint has
        self._hand_over: dict[str, Any] = {}
        self._in_place: set[int] = set()
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
        for name in both:
            t = self._wanted[name]
            if isinstance(t, Tensor) and isinstance(saved[name], Stored):
                cut = layout_of(t, self._ctx, f"the model's {name!r}")
                self._layouts[name] = cut or Layout(tuple(t.shape))
        wrong = [text for name in both for text in self._misfits(name, saved[name])]
        if wrong or (strict and absent):
            raise CheckpointError(listed(f"{where} does not fit the model", wrong + absent if strict else wrong))
        if absent:
            self._notes.append(listed(f"{where} does not fit the model everywhere, and strict=False", absent))
        for name in both:
            self._plan(name, saved[name])
        self._note_precision()

    def _misfits(self, name: str, stored: Any) -> Iterator[str]:
        t = self._wanted[name]
        if name.rpartition(".")[2] == _EXTRA_STATE:
            return
        if isinstance(t, Tensor) and isinstance(stored, Stored):
            yield from misfits(name, stored, self._layouts[name], t.dtype, self._ctx.mesh)
        elif isinstance(t, Tensor) or isinstance(stored, Stored):
            yield f"{name!r}: the checkpoint has {_shape(stored)}, the model {_shape(t)}"

    def _plan(self, name: str, stored: Any) -> None:
        t = self._wanted[name]
        if not isinstance(stored, Stored) or not isinstance(t, Tensor):
            self._hand_over[name] = stored
            return
        plan, out = stored.plan(self._layouts[name], self._ctx.rank, self._ctx.mesh), t
        if id(t) in self._reads:
            other, known, _ = self._reads[id(t)]
            same = stored.first.identity == known.stored.first.identity
            if not same and not torch.equal(plan.tensor(t.dtype), known.tensor(t.dtype)):
                raise CheckpointError(f"{name!r} and {other!r} are one tensor in the model, two in the checkpoint")
            return
        if id(t) in self._owned and not t.is_meta:
            self._in_place.add(id(t))
        else:
            device = self._ctx.device if t.is_meta else torch.device("cpu")
            out = torch.empty(t.shape, dtype=t.dtype, device=device)
        self._reads[id(t)] = name, plan, out

    def _note_precision(self) -> None:
        dtypes = [(name, plan.dtype, out.dtype) for name, plan, out in self._reads.values()]
        lossy = [(n, have, want) for n, have, want in dtypes if have != want and have.itemsize >= want.itemsize]
        lines = [f"{name!r}: from {have} to the model's {want}" for name, have, want in lossy]
        self._notes += [listed("tensors lose precision", lines)] if lines else []

    # -- changing -----------------------------------------------------------------------------------------
    def verify(self) -> None:
        """Compare the checksums of shards that ``run`` reads straight into the model."""
        for key in self._in_place:
            self._reads[key][1].verify()

    def run(self) -> None:
        for key, (_, plan, out) in self._reads.items():
            plan.fill(out, check=key not in self._in_place)

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
            refuse_while_on_meta(self._model)
        return self._notes


def misfits(name: str, stored: Stored, want: Layout, dtype: torch.dtype, mesh: Mesh) -> Iterator[str]:
    """Why a stored tensor cannot be loaded into a model's tensor of layout ``want`` on ``mesh``."""
    if not stored.kept(want, mesh) and stored.shape != want.shape:
        cut = "" if not want.cuts else f", of which this rank holds {want.local_shape(mesh)}"
        yield f"{name!r}: the checkpoint has shape {stored.shape}, the model {want.shape}{cut}"
    elif stored.dtype != dtype and not (stored.dtype.is_floating_point and dtype.is_floating_point):
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


def refuse_while_on_meta(model: nn.Module) -> None:
    """Make modules with a buffer on meta refuse to run until it has values: torch may compute without an error."""
    for name, module in model.named_modules():
        if _on_meta(module):
            module.register_forward_pre_hook(_Refusing(name or type(module).__name__))


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
