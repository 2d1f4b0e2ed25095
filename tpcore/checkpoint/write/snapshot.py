"""One rank's part of a state to save: JSON with the place of each tensor, and the tensors with their layouts."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...backend.interface import Backend
from ...comm.comm import Comm
from ...layers.sharding import sharding
from ...layout.layout import Layout
from ...nested import is_plain
from ...runtime.context import ParallelContext
from ...train.zero import Zero1
from ..storage.tensorfile import Writable, nbytes_of
from ..stored import LayoutOnRecord, ReadPlan, layout_of
from ..tree import TAG, Path, dotted, encode, is_optimizer, model_tensors, parameter_names

_FILE_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class Entry(Writable, Protocol):
    """One tensor to write, and its layout."""

    @property
    def layout(self) -> LayoutOnRecord: ...


class StateTensor:
    """A tensor of a state. ``to``: the dtype to write. ``gather``: gathers the values of one split over dp ranks."""

    def __init__(
        self,
        tensor: Tensor,
        layout: LayoutOnRecord = None,
        to: torch.dtype | None = None,
        gather: Callable[[], Tensor] | None = None,
    ) -> None:
        self._tensor, self.layout, self.dtype, self.shape = tensor, layout, to or tensor.dtype, tuple(tensor.shape)
        self._gather, self.gathered = gather, gather is not None

    def gather(self, *, keep: bool) -> None:
        """Gather the values, collective over dp. ``keep``: this rank writes them, so keep a host copy."""
        if self._gather is not None:
            values = self._gather()
            if keep:
                # a copy: of one dp rank the values are the optimizer's own memory, which later steps change
                self._tensor = values.detach().cpu().to(self.dtype, copy=True)

    def pieces(self) -> list[Tensor]:
        # moved before it is converted: a lazy device would compile a program for the conversion
        values = self._tensor.detach().cpu().to(self.dtype).resolve_conj().resolve_neg()
        return [values.contiguous()]

    def copied(self) -> StateTensor:
        """A copy in host memory, complete when this returns: later steps may change the tensor."""
        if self.gathered:
            return self
        piece = self.pieces()[0]  # of a CPU tensor the model's own memory
        return StateTensor(piece.clone() if self._tensor.device.type == "cpu" else piece, self.layout)


LayoutOf = Callable[[Tensor, str], LayoutOnRecord]
MemoryOf = Callable[[Tensor], object]
"""``Backend.memory_of``: returns an equal object for tensors that share their memory."""
Gather = Mapping[int, Callable[[], Tensor]]
"""By ``id`` of a tensor on meta that stands for the parts of dp ranks: gathers its values, collective over dp."""


class Part:
    """One rank's state as JSON, and its tensors by file and name."""

    def __init__(
        self,
        state: dict[Any, Any],
        layout_of_entry: LayoutOf,
        memory_of: MemoryOf = Backend.memory_of,
        *,
        gather: Gather | None = None,
        ep: Comm | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(state, dict):
            example, what = '{"model": model.state_dict()}', type(state).__name__
            raise ValueError(f"save(state, path) takes a dict as its state, such as {example}, not a {what}")
        self._layout_of, self._memory_of, self._dtype = layout_of_entry, memory_of, dtype
        self._places: dict[Any, dict[str, Any]] = {}
        self._gather, self._ep = gather or {}, ep
        self.files: dict[str, dict[str, StateTensor]] = defaultdict(dict)
        self._stems: dict[Any, str] = {}
        self._names = defaultdict[str, set[str]](lambda: {"__metadata__"})  # taken: by file; of files, under ""
        self.tree = encode(state, self._leaf)
        optimizers = (self._stems.get((key,)) for key, value in state.items() if is_optimizer(value))
        self.optional = {f"{stem}.safetensors" for stem in optimizers}
        """Files of optimizers' state."""

    def _leaf(self, t: Tensor | ReadPlan, path: Path) -> dict[str, Any]:
        """The JSON of ``t``: its file and name. Tensors that share their memory, or their bytes, are stored once."""
        if isinstance(t, ReadPlan):
            shard = t.stored.first
            return self._placed((shard.identity, shard.shape, shard.dtype, t.layout), path, lambda: t)
        where = dotted(path)
        if not is_plain(t) or t.layout != torch.strided or t.is_quantized:
            raise ValueError(f"cannot save {where}: a {type(t).__name__} of layout {t.layout}, dtype {t.dtype}")
        if t.is_meta and id(t) not in self._gather:
            raise ValueError(f"cannot save {where}: it is on the meta device and has no values")
        layout = self._layout_of(t, where)
        # tensors without dims count steps, and bfloat16 counts only to 256
        narrow = t.dtype == torch.float32 and t.ndim > 0
        writer = partial(self._writer, t, layout, self._dtype if narrow else None)
        return self._placed((self._memory_of(t), layout), path, writer)

    def _placed(self, key: object, path: Path, writer: Callable[[], Any]) -> dict[str, Any]:
        if key not in self._places:
            file = self._file(path)
            name = _unused(".".join(map(str, path[1:] or path)), self._names[file])
            self.files[file][name] = writer()
            self._places[key] = {TAG: "tensor", "file": file, "name": name}
        return self._places[key]

    def _writer(self, t: Tensor, layout: LayoutOnRecord, to: torch.dtype | None) -> StateTensor:
        gather, ep = self._gather.get(id(t)), self._ep
        if ep is None or not isinstance(layout, Layout) or "ep" not in layout.axes:
            return StateTensor(t, layout, to, gather)
        # the parts of all ep ranks together: a checkpoint knows tp and stages alone
        stand_in = torch.empty((t.shape[0] * ep.size, *t.shape[1:]), dtype=t.dtype, device="meta")
        return StateTensor(stand_in, layout.without("ep"), to, lambda: ep.all_gather(gather() if gather else t, 0))

    def _file(self, path: Path) -> str:
        """The file of a top-level entry, with its name if that is a valid file name."""
        top = path[:1] if len(path) > 1 else ("tensors", "of the top level")
        if top not in self._stems:
            fits = isinstance(top[0], str) and _FILE_STEM.fullmatch(top[0])
            self._stems[top] = _unused(str(top[0]) if fits else "part", self._names[""])
        return f"{self._stems[top]}.safetensors"

    def share(self, rank: int, n: int, *, all_of_it: bool) -> dict[str, dict[str, StateTensor]]:
        """The files that ``rank`` writes, of ``n`` ranks: shares of all tensors, or of gathered ones alone."""
        if n == 1:
            return self.files
        load, out = [0] * n, defaultdict[str, dict[str, StateTensor]](dict)
        # what the first rank may write alone comes first, then large before small
        order = [(t.gathered, -nbytes_of(t), file, name, t) for file, name, t, _ in self.placed()]
        places = {(p["file"], p["name"]): p for p in self._places.values()}
        for gathered, _, file, name, entry in sorted(order, key=lambda of: of[:4]):
            shared = all_of_it or gathered
            who = load.index(min(load)) if shared else 0
            load[who] += nbytes_of(entry)
            if shared:
                places[file, name]["file"] = file.removesuffix(".safetensors") + f".dp{who}.safetensors"
            if who == rank:
                out[places[file, name]["file"]][name] = entry
        return out

    def placed(self) -> Iterator[tuple[str, str, StateTensor, str]]:
        """File and name of each tensor, the tensor, and the file that it is written to: that of a share."""
        for place in self._places.values():
            written, name = place["file"], place["name"]
            file = f"{written.partition('.')[0]}.safetensors"
            yield file, name, self.files[file][name], written

    def gather(self, entries_by_file: Mapping[str, Mapping[str, StateTensor]]) -> None:
        """Gather tensors that are split over dp ranks, and keep those that this rank writes. Collective over dp."""
        kept = {id(entry) for entries in entries_by_file.values() for entry in entries.values()}
        for entries in self.files.values():
            for entry in entries.values():
                if entry.gathered:
                    entry.gather(keep=id(entry) in kept)


def on_host(files: Mapping[str, Mapping[str, StateTensor]]) -> dict[str, dict[str, StateTensor]]:
    """Copies of all values in host memory, for a later write."""
    return {file: {name: entry.copied() for name, entry in some.items()} for file, some in files.items()}


def total_of(files: Mapping[str, Mapping[str, Entry]]) -> int:
    return sum(nbytes_of(entry) for entries in files.values() for entry in entries.values())


def _unused(name: str, taken: set[str]) -> str:
    """``name``, with a number if it is ``taken``, which it then is. Case is ignored, as on some file systems."""
    candidate, i = name, 1
    while candidate.lower() in taken:
        i += 1
        candidate = f"{name}-{i}"
    taken.add(candidate.lower())
    return candidate


# -- optimizers in a state, and the layouts of all tensors ---------------------------------------------------
def resolve(state: Any, ctx: ParallelContext) -> tuple[Any, LayoutOf, Gather]:
    """``state`` with ``state_dict()``s in place of optimizers, the function that returns the layout to record for a
    tensor, and how to gather those on meta. ValueError if an optimizer of a pipeline stage has unnamed parameters,
    or a Zero1 gradients that no step has used. At pp=1 a warning says where an unnamed state can be loaded."""
    known: dict[int, Layout] = {}
    gather: dict[int, Callable[[], Tensor]] = {}
    replaced: dict[Any, Any] = {}
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, torch.optim.Optimizer):
            outline = value.outline() if isinstance(value, Zero1) else None
            saved = value.state_dict() if outline is None else outline.state
            gather.update({} if outline is None else outline.gather)
            parameters = [p for group in value.param_groups for p in group["params"]]
            for number, t in _tensors_of(saved):
                if t.ndim and t.shape == parameters[number].shape:
                    layout = layout_of(parameters[number], ctx, f"parameter {number}")
                    known[id(t)] = layout or Layout(tuple(t.shape))
            _name(value, saved, state, ctx, key)
            _warn_of_no_names(key, saved, ctx, "at another number of pipeline stages")
            replaced[key] = saved
        elif is_optimizer(value):
            _warn_of_no_names(key, value, ctx, "at another degree")
    new = {**state, **replaced} if replaced else state
    return new, _layouts_of(new, ctx, known), gather


def _warn_of_no_names(key: Any, saved: Mapping[str, Any], ctx: ParallelContext, where: str) -> None:
    """Now, while the job that can name them runs, and not when the checkpoint is opened elsewhere."""
    kept = any(t.ndim for _, t in _tensors_of(saved))
    named = all(group.get("param_names") or not group["params"] for group in saved["param_groups"])
    if kept and not named and ctx.rank == 0:
        warnings.warn(
            f"{key!r} is saved without the names of its parameters, and cannot be loaded {where}. Save the "
            "optimizer itself with model.state_dict(), or make it from model.named_parameters()",
            stacklevel=2,
        )


def _tensors_of(optimizer: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """The tensors of a ``state_dict()``, each with the index of its parameter."""
    for index, values in optimizer["state"].items():
        for value in values.values() if isinstance(values, Mapping) else ():
            if isinstance(value, Tensor):
                yield index, value


def _name(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], state: Mapping[Any, Any], ctx: ParallelContext, key: Any
) -> None:
    """Give unnamed parameters in ``saved`` their names in the model that is saved with the optimizer."""
    names: dict[object, str] = {}
    for name, t in model_tensors(state):
        if isinstance(name, str):
            names.setdefault(ctx.backend.memory_of(t), name)
    for group, current in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        known = [names.get(ctx.backend.memory_of(p)) for p in current["params"]]
        if group.get("param_names") or not known:
            continue
        if None not in known:
            group["param_names"] = known
        elif ctx.mesh.axes.get("pp", 1) > 1:
            raise ValueError(
                f"cannot save {key!r}: the parameters of its optimizer have no names, without which a job of "
                "other pipeline stages could not tell whose values it holds. Make the optimizer from "
                "model.named_parameters(), or save model.state_dict() with it"
            )


def _layouts_of(state: Any, ctx: ParallelContext, known: Mapping[int, Layout]) -> LayoutOf:
    """``known``: some of them, by ``id``. The entry of a plain module that shares a parallel layer's parameter, as
    ``cls.predictions.bias`` in transformers' BERT, is not stamped, but shares its memory with one that is. A parameter
    that a script has marked is known to ``ctx``."""
    memory_of = ctx.backend.memory_of
    stamped = (t for _, t in model_tensors(state) if sharding(t) is not None)
    by_script = (p for p in (of() for of in ctx.marked.values()) if p is not None)
    marked: dict[object, Tensor] = {memory_of(t): t for t in (*stamped, *by_script) if not t.is_meta}
    optimizers = [o for o in state.values() if is_optimizer(o)] if isinstance(state, Mapping) else []
    layouts: dict[str, set[Layout]] = defaultdict(set)  # of the models' parameters
    for name, t in model_tensors(state) if optimizers else ():
        mark = sharding(t if t.is_meta else marked.get(memory_of(t), t))
        layouts[name].add(mark.layout if mark else Layout(tuple(t.shape)))
    # unknown if the optimizer was not made from named_parameters(), or for another shape than the shard's
    of_optimizers: dict[int, LayoutOnRecord] = {}
    for optimizer in optimizers:
        names = dict(parameter_names(optimizer["param_groups"]))
        for index, value in _tensors_of(optimizer):
            if value.ndim:  # others count steps
                candidates = [*layouts[names.get(index, "")]]
                fits = len(candidates) == 1 and tuple(value.shape) == candidates[0].local_shape(ctx.mesh)
                of_optimizers[id(value)] = candidates[0] if fits else "unknown"

    def layout_of_entry(t: Tensor, where: str) -> LayoutOnRecord:
        return known.get(id(t)) or layout_of(marked.get(memory_of(t), t), ctx, where) or of_optimizers.get(id(t))

    return layout_of_entry
