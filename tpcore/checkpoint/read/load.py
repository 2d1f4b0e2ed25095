"""One load on one rank: a list of all tensors to read, compared with the model and then read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layers.sharding import Sharding, stamp
from ...layout.layout import Layout
from ...runtime.consensus import gather, together
from ...runtime.context import ParallelContext
from ...train.zero import ReadRun, Zero1, fitted
from ..forms.source import OfParameter, Source, SpecOf, Stage
from ..storage.files import SILENT, Progress, bar, listed, naming
from ..storage.tensorfile import nbytes_of
from ..stored import Stored
from ..tree import dotted, is_optimizer
from .source import model_of
from .states import ModelState, TensorRead, aligned, layouts_here, parameter_layouts, state_here


def _counted(fill: ReadRun, progress: Progress) -> ReadRun:
    def run(start: int, out: Tensor) -> None:
        fill(start, out)
        progress.add(nbytes_of(out))

    return run


class Loading:
    """One load on one rank. ``compare`` lists what ``run`` reads: a row for each tensor of the model, of an optimizer
    and of other entries. ``target``: takes the entry ``key`` by its ``load_state_dict``; a Zero1 then reads its tensors
    by itself."""

    def __init__(
        self,
        ctx: ParallelContext,
        source: Source,
        model: nn.Module | None,
        target: Any = None,
        key: Any = None,
        *,
        strict: bool,
        sharded: bool,
    ) -> None:
        self._ctx, self._source, self._strict, self._sharded = ctx, source, strict, sharded
        self._model, self._target, self._key = None if model is None else ModelState(model, ctx), target, key
        self._rows: list[TensorRead] = []
        self._of_entries: dict[Stored, TensorRead] = {}
        self._layouts: dict[Stored, Layout] = {}  # of optimizers' tensors, where they differ from the file's
        self._elsewhere: list[str] = []  # names of the checkpoint that this stage's model lacks
        self._rest: Any = {}
        self._notes: list[str] = []

    # -- comparing ----------------------------------------------------------------------------------------
    def compare(self) -> None:
        """List the rows, and check that all of them can be read, before anything is changed."""
        ctx, source, model, target = self._ctx, self._source, self._model, self._target
        optimizer = target if isinstance(target, torch.optim.Optimizer) else None
        module = None if model is None else model.module
        numbered, names = ({}, None) if optimizer is None else parameter_layouts(optimizer, ctx, module)
        by_name = dict[str, Layout]() if model is None else dict(model.layouts)
        by_name |= {name: layout for name, layout in zip(names or (), numbered.values(), strict=False) if layout}
        if module is not None and names is None:
            names = [name for name, _ in module.named_parameters()]
        spec_of: SpecOf = (lambda name, shape, m: None) if model is None else model.spec_of
        at, axes = ctx.mesh.coords(ctx.rank), ctx.mesh.axes
        restaged = source.pp != (axes.get("pp", 1) if self._sharded else 1)
        same = self._sharded and source.tp == axes.get("tp", 1) and not restaged
        tp_rank, pp_rank = at.get("tp", 0) if same else None, at.get("pp", 0) if self._sharded else 0
        stage = source.entries_of_all(spec_of, names) if restaged else source.stage(pp_rank, tp_rank, spec_of)
        if not restaged and source.pp > 1 and model is not None and self._sharded and source.restages:
            # as many stages of other layers
            restaged = (stage.model() or {}).keys() != model.entries.keys()
            stage = source.entries_of_all(spec_of, names) if restaged else stage
        other_degree = model is None and optimizer is not None and tp_rank is None and not restaged
        if other_degree and (states := stage.states()) is not None:
            self._rest = stage.entries(self._memory, stage.bound() if self._sharded else ())
            self._rest[self._key] = state_here(states, optimizer, ctx, source.path, self._memory)
            return
        saved: Mapping[str, Any] = {}
        if model is not None:
            saved = self._rows_of_model(model, None if restaged else stage.model(self._memory))
        tensors = list(stage.of_parameters())
        self._layouts, unknown = layouts_here(tensors, by_name, numbered if model is None else {})
        bound = dict.fromkeys(unknown, why) if unknown and (why := self._other_layout(saved, by_name)) else {}
        self._list_entries(stage, tensors, bound, alone=model is None and target is not None and restaged)
        self._each("checking", self._in_place(), lambda row: row.plan.verify())

    def _in_place(self) -> list[TensorRead]:
        return [row for row in self._rows if row.in_place]

    def _each(self, title: str, rows: Collection[TensorRead], do: Callable[[TensorRead], None]) -> None:
        """``do`` with every row, rank 0 with a bar."""
        with self._bar(title, rows) as progress:
            for row in rows:
                do(row)
                if progress is not SILENT:
                    progress.add(nbytes_of(row.out))

    def _bar(self, title: str, rows: Collection[TensorRead], ranks: int = 1) -> AbstractContextManager[Progress]:
        """Of the bytes of ``rows``, of which ``ranks`` read as many each."""
        return bar(title, lambda: sum(nbytes_of(row.out) for row in rows) // ranks, shown=self._ctx.rank == 0)

    def _rows_of_model(self, model: ModelState, saved: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The saved state of this model, whose rows are added: of its stage, or of all stages if that lacks some of its
        names. ``saved``: that of its stage; None if the stages are others."""
        whole = not self._sharded
        if whole:
            saved = aligned(saved or {}, set(model.entries))
        elif saved is None or (self._source.pp > 1 and not model.entries.keys() <= saved.keys()):
            saved, whole = model_of(self._source, model.spec_of) | dict(saved or {}), True
        if whole and self._ctx.mesh.axes.get("pp", 1) > 1:  # ``run`` finds names that no stage's model has
            self._elsewhere = [name for name in saved if name not in model.entries]
            saved = {name: item for name, item in saved.items() if name in model.entries}
        rows, notes = model.compare(saved, self._source.path, strict=self._strict)
        self._rows += rows
        self._notes += notes
        return saved

    def _other_layout(self, saved: Mapping[str, Any], by_name: Mapping[str, Layout]) -> str | None:
        """Why a state of unknown parameters cannot be loaded: a tensor of the model is not sharded as in the file."""
        for name, stored in saved.items():
            want = by_name.get(name)
            if want is not None and isinstance(stored, Stored) and not stored.kept(want, self._ctx.mesh):
                return (
                    f"{self._source.path}: the model cuts {name!r} as {want}, the file as {stored.layout}, and which "
                    "parameters the optimizer's state belongs to is not on record: it was saved without the model, or "
                    "not made from model.named_parameters()"
                )
        return None

    def _list_entries(
        self, stage: Stage, tensors: Collection[OfParameter], bound: dict[Any, str], *, alone: bool
    ) -> None:
        """The rows of entries other than the model. ``bound``: why some can be loaded only as they were saved.
        ``alone``: those that the target does not take may be left out."""
        every = self._model is None
        bound |= stage.bound(model=every) if self._sharded else {}
        for why in dict.fromkeys(bound.values()):
            if self._strict and (not alone or bound.get(self._key) == why):
                keys = ", ".join(dotted((key,)) for key in bound if bound[key] == why)
                raise CheckpointError(f"{why}. strict=False leaves {keys} out")
            self._notes.append(f"left out: {why}")
        for of in tensors if isinstance(self._target, Zero1) else ():
            if of.key == self._key and of.stored.first.shape:
                self._memory(of.stored, device="meta")
        self._rest = stage.entries(self._memory, bound, model=every)

    def _memory(self, stored: Stored, layout: Layout | None = None, device: str = "cpu") -> Tensor:
        """For a tensor of an entry, whose row is added. Places where the same tensor was saved share it."""
        if stored not in self._of_entries:
            layout = layout or self._layouts.get(stored)
            plan = stored.plan(layout, self._ctx.rank, self._ctx.mesh)
            out = torch.empty(plan.shape, dtype=plan.dtype, device=device)
            layout = layout or (stored.layout if isinstance(stored.layout, Layout) else None)
            if layout is not None and self._ctx.mesh.axes.get("tp", 1) > 1:  # so that the next save records it
                stamp(out, Sharding(layout, self._ctx))
            self._of_entries[stored] = TensorRead(stored.where, plan, out)
            self._rows.append(self._of_entries[stored])
        return self._of_entries[stored].out

    # -- reading ------------------------------------------------------------------------------------------
    def run(self, *, quiet: bool = False) -> Any:
        """Read, after ``compare``. Returns the entries that neither the model nor the target takes. Collective over
        the world."""
        ctx, path, model = self._ctx, self._source.path, self._model
        seen = set(gather(self._source.save_id, ctx.world))
        if len(seen) > 1:
            raise CheckpointError(f"{path} was replaced while it was opened: the ranks saw {sorted(seen)}")
        if model is not None and ctx.mesh.axes.get("pp", 1) > 1:
            self._check_names(model.entries)
        # first what the model does not see: while a rank finds damage there, no rank has changed anything
        with together(ctx), naming("load", path):
            share, n = ctx.index(ctx.data), ctx.data.size
            in_runs = [row for row in self._rows if row.out.is_meta]
            if n > 1:  # dp ranks read shares
                self._each("checking", in_runs[share::n], lambda row: row.plan.verify())
            whole = [row for row in self._rows if not row.in_place and not row.out.is_meta]
            self._each("loading", whole, lambda row: row.plan.fill(row.out))
        if self._target is not None:
            with together(ctx), naming("load", path):
                self._give()
        # the model last, so that as little as possible can fail once it has changed
        with together(ctx), naming("load", path):
            self._each("loading", self._in_place(), lambda row: row.plan.fill(row.out, check=False))
        with together(ctx):
            if model is not None:
                self._notes += model.assign()
            for note in self._notes if ctx.rank == 0 and not quiet else ():
                warnings.warn(note, stacklevel=3)
        return self._rest

    def _check_names(self, names: Collection[str]) -> None:
        """CheckpointError for names that no stage's model has, as where there is one stage. Collective."""
        with together(self._ctx):
            known = {name for of_stage in gather(sorted(names), self._ctx.comm("pp")) for name in of_stage}
            wrong = [n for n in self._elsewhere if n not in known]
            lines = [f"{n!r}: the checkpoint has it, the model of no stage" for n in wrong]
            if lines and self._strict:
                raise CheckpointError(listed(f"{self._source.path} does not fit the model", lines))
        if lines:
            self._notes.append(listed(f"{self._source.path} has more than the model, and strict=False", lines))

    def _give(self) -> None:
        """Let the target take its entry out of those that were read, before the model is changed."""
        if self._key not in self._rest:
            raise ValueError(f"{self._source.path} has no entry {self._key!r}; it has {list(self._rest)}")
        saved, target = self._rest.pop(self._key), self._target
        if isinstance(target, torch.optim.Optimizer) and is_optimizer(saved):
            parameters = {} if self._model is None else self._model.module.named_parameters(remove_duplicate=False)
            saved = fitted(target, saved, dict(parameters))
        if isinstance(target, Zero1):
            rows = [row for row in self._rows if row.out.is_meta]
            with self._bar("loading", rows, self._ctx.data.size) as progress:
                target.load_outline(saved, {id(row.out): _counted(row.plan.fill_run, progress) for row in rows})
        else:
            target.load_state_dict(saved)
