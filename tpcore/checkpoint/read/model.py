"""One load on one rank: compares the open checkpoint with the model, then reads it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layers.sharding import Sharding, layouts, stamp
from ...layout.layout import Layout
from ...runtime.consensus import gather, together
from ...runtime.context import ParallelContext
from ...train.zero import OF_SUMS, SUMS, ReadRun
from ..format.tree import dotted
from ..forms.source import Cuts, OfParameter, Source, Stage
from ..storage.files import listed, naming
from ..tensors.stored import ReadPlan, Stored
from .fit import Fit, aligned
from .source import model_of


class Loading:
    """One load on one rank: compares the open checkpoint with the model, then reads it."""

    def __init__(
        self, ctx: ParallelContext, source: Source, *, strict: bool, sharded: bool, quiet: bool = False
    ) -> None:
        self._ctx, self._source, self._strict, self._sharded = ctx, source, strict, sharded
        self._quiet = quiet
        at, axes = ctx.mesh.coords(ctx.rank), ctx.mesh.axes
        self._rank, self._n = at.get("tp", 0), axes.get("tp", 1)
        self._pp_rank, pp = (at.get("pp", 0), axes.get("pp", 1)) if sharded else (0, 1)
        self.restaged = source.pp != pp
        self._filled: dict[Stored, tuple[ReadPlan, Tensor]] = {}  # tensors outside of the model
        self._fit: Fit | None = None
        self._wants: dict[Stored, Layout] = {}  # layouts of optimizers' tensors that differ from the file's
        self._later: dict[Stored, tuple[ReadPlan, Tensor]] = {}  # the same, on meta: read after the rest
        self._elsewhere: list[str] = []  # names of the checkpoint that this stage's model lacks
        self._rest: Any = {}
        self._notes: list[str] = []

    def stage(self, cuts: Cuts, names: Sequence[str] | None = None) -> Stage:
        """The stage to load. ``names``: the optimizer's parameters, used if the number of stages differs."""
        if self.restaged:
            return self._source.entries_of_all(cuts, names)
        own = self._rank if self._source.tp == self._n else None
        return self._source.stage(self._pp_rank, own, cuts)

    def states(self) -> tuple[Sequence[Mapping[str, Any]] | None, dict[Any, Any]]:
        """Entry ``model_key`` of each rank, and the entries all have. None at one degree, and if cuts are recorded."""
        if self.restaged or (self._sharded and self._source.tp == self._n):
            return None, {}
        stage = self._source.stage(self._pp_rank, None, _cuts_of(None))
        states = stage.states()
        bound = stage.bound() if self._sharded else ()
        return states, {} if states is None else stage.entries(self._fill, bound)

    def compare(
        self,
        model: nn.Module | None,
        parameters: Sequence[Layout | None] = (),
        names: Sequence[str] | None = None,
        key: str | None = None,
        later: str | None = None,
    ) -> None:
        """Check that everything can be loaded, before anything is changed. ``parameters``, ``names``: layouts and names
        of an optimizer's parameters, in the order of its groups. ``key``: the entry that the optimizer loads; others
        may be left out. ``later``: the entry of an optimizer that reads its tensors by itself, in ``run``."""
        by_name = dict(zip(names, parameters, strict=True)) if names else {}
        if model is not None and names is None:
            names = [name for name, _ in model.named_parameters()]
        stage, whole = self.stage(_cuts_of(model), names), model is None
        if model is not None:
            saved = self._model(model, stage)
            if not self._sharded:
                wanted = set(model.state_dict(keep_vars=True))
                saved = aligned(saved, wanted)
                if self._ctx.mesh.axes.get("pp", 1) > 1:
                    saved = self._of_this_stage(saved, wanted)
            self._fit = Fit(model, saved, self._ctx, self._source.path, strict=self._strict)
        bound = dict(stage.bound(model=whole)) if self._sharded else {}
        bound |= {of.key: OF_SUMS for of in stage.of_parameters() if of.stored.where.endswith(f".{SUMS}")}
        if model is not None:
            bound = self._follow_model(stage, model, saved) | bound
        if parameters:
            self._follow(
                stage.of_parameters(),
                lambda of: by_name.get(of.name) if by_name and of.name else dict(enumerate(parameters)).get(of.number),
            )
        for why in dict.fromkeys(bound.values()):
            if self._strict and (key is None or bound.get(key) == why):
                keys = ", ".join(dotted((key,)) for key in bound if bound[key] == why)
                raise CheckpointError(f"{why}. strict=False leaves {keys} out")
            self._notes.append(f"left out: {why}")
        for of in stage.of_parameters() if later is not None else ():
            if of.key == later and of.stored.first.shape:
                plan = self._plan(of.stored)
                self._later[of.stored] = plan, torch.empty(plan.shape, dtype=plan.dtype, device="meta")
        self._rest = stage.entries(self._fill, bound, model=whole)
        if self._fit is not None:
            self._fit.verify()

    def _model(self, model: nn.Module, stage: Stage) -> Mapping[str, Any]:
        """The saved state for this model: of its stage, or of all stages if that lacks some of its names."""
        saved = {} if self.restaged else dict(stage.model(self._fill))
        wanted = model.state_dict(keep_vars=True).keys()
        if not self.restaged and (self._source.pp == 1 or wanted <= saved.keys()):
            return saved
        every, pp = model_of(self._source, _cuts_of(model)), self._ctx.mesh.axes.get("pp", 1)
        return (every if pp == 1 else self._of_this_stage(every, wanted)) | saved

    def _of_this_stage(self, every: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
        """The items that this stage's model has. ``run`` finds names that no stage's model has."""
        self._elsewhere = [name for name in every if name not in wanted]
        return {name: item for name, item in every.items() if name in wanted}

    def _verify_names(self, model_names: Collection[str]) -> None:
        """CheckpointError for names that no stage's model has, as where there is one stage. Collective."""
        with together(self._ctx):
            known = {name for names in gather(sorted(model_names), self._ctx.comm("pp")) for name in names}
            wrong = [n for n in self._elsewhere if n not in known]
            lines = [f"{n!r}: the checkpoint has it, the model of no stage" for n in wrong]
            if lines and self._strict:
                raise CheckpointError(listed(f"{self._source.path} does not fit the model", lines))
        if lines:
            self._notes.append(listed(f"{self._source.path} has more than the model, and strict=False", lines))

    def _follow(self, tensors: Iterable[OfParameter], layout_of: Callable[[OfParameter], Layout | None]) -> set[Any]:
        """Cut optimizers' tensors like their parameters. Returns the keys of optimizers with unknown cuts."""
        unknown = set()
        for of in tensors:
            want, cut = layout_of(of), of.stored.cut
            if want is not None and isinstance(cut, Layout):
                if cut.shape == want.shape:
                    self._wants[of.stored] = want
            elif of.stored.first.shape:
                unknown.add(of.key)
        return unknown

    def _follow_model(self, stage: Stage, model: nn.Module, saved: Mapping[str, Any]) -> dict[Any, str]:
        """Cut optimizers' tensors like the model's parameters. Returns by key why an entry cannot load."""
        tensors = list(stage.of_parameters())
        if not tensors:
            return {}
        wanted = layouts(model)
        unknown = self._follow(tensors, lambda of: wanted.get(of.name or ""))
        for name, stored in saved.items() if unknown else ():
            want = wanted.get(name)
            if want is not None and isinstance(stored, Stored) and not stored.kept(want, self._ctx.mesh):
                why = (
                    f"{self._source.path}: the model cuts {name!r} as {want}, the file as {stored.cut}, and which "
                    "parameters the optimizer's state belongs to is not on record: it was saved without the model, or "
                    "not made from model.named_parameters() (torch 2.6)"
                )
                return dict.fromkeys(unknown, why)
        return {}

    def _plan(self, stored: Stored) -> ReadPlan:
        return stored.plan(self._wants.get(stored), self._ctx.rank, self._ctx.mesh)

    def _fill(self, stored: Stored) -> Tensor:
        """Memory for a tensor, which ``run`` fills. Places where the same tensor was saved share it."""
        if stored in self._later:
            return self._later[stored][1]
        if stored not in self._filled:
            plan = self._plan(stored)
            out = torch.empty(plan.shape, dtype=plan.dtype)
            cut = self._wants.get(stored) or stored.cut
            if isinstance(cut, Layout) and self._n > 1:  # so that the next save records it
                stamp(out, Sharding(cut, self._ctx))
            self._filled[stored] = plan, out
        return self._filled[stored][1]

    def run(self, take: Callable[[Any, Mapping[int, ReadRun]], None] | None = None) -> Any:
        """Read, after ``compare``. Returns the entries other than the model. Collective over the world. ``take``:
        called with them, and with a reader by the ``id`` of each tensor on meta in them, before the model is
        changed."""
        ctx, path = self._ctx, self._source.path
        seen = set(gather(self._source.save_id, ctx.world))
        if len(seen) > 1:
            raise CheckpointError(f"{path} was replaced while it was opened: the ranks saw {sorted(seen)}")
        if self._fit is not None and self._ctx.mesh.axes.get("pp", 1) > 1:
            self._verify_names(self._fit.names)
        # first what the model does not see: while a rank finds damage there, no rank has changed anything
        with together(ctx), naming("load", path):
            share, n = ctx.index(ctx.data), ctx.data.size
            for plan, _ in [*self._later.values()][share::n] if n > 1 else ():  # which dp ranks read in runs
                plan.verify()
            for plan, out in self._filled.values():
                plan.fill(out)
        if take is not None:
            with together(ctx), naming("load", path):
                take(self._rest, {id(like): plan.fill_run for plan, like in self._later.values()})
        # the model last, so that as little as possible can fail once it has changed
        with together(ctx), naming("load", path):
            if self._fit is not None:
                self._fit.run()
        with together(ctx):
            if self._fit is not None:
                self._notes += self._fit.finish()
            for note in self._notes if ctx.rank == 0 and not self._quiet else ():
                warnings.warn(note, stacklevel=4)
        return self._rest


def _cuts_of(model: nn.Module | None) -> Cuts:
    """The cuts of the model's parameters, for files that do not record cuts."""
    by_name = {} if model is None else layouts(model)
    cuts = {name: layout.cuts[0] for name, layout in by_name.items() if layout.cuts}
    specs = {name: cut.spec for name, cut in cuts.items() if cut.axes != ("ep",)}
    return lambda name, shape, m: specs.get(name)
