"""One load on one rank: compares the open checkpoint with the model, then reads it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...layers.sharding import Sharding, layouts, stamp
from ...layout.layout import Layout
from ...runtime.consensus import gather, together
from ...runtime.context import ParallelContext
from ...train.zero import OF_SUMS, SUMS, Zero1, fitted, renumbered
from ..forms.pickles import in_own_memory, mapped
from ..forms.rank_files import in_order
from ..forms.source import Cuts, OfParameter, Source, Stage
from ..storage.files import listed, naming
from ..stored import ReadPlan, Stored, layout_of
from ..tree import dotted, is_optimizer
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
        self._n = axes.get("tp", 1)
        self._pp_rank, pp = (at.get("pp", 0), axes.get("pp", 1)) if sharded else (0, 1)
        self._restaged = source.pp != pp
        self._tp_rank = at.get("tp", 0) if sharded and source.tp == self._n and not self._restaged else None
        self._model: nn.Module | None = None
        self._target: Any = None
        self._key: Any = None
        self._filled: dict[Stored, tuple[ReadPlan, Tensor]] = {}  # tensors outside of the model
        self._fit: Fit | None = None
        self._wants: dict[Stored, Layout] = {}  # layouts of optimizers' tensors that differ from the file's
        self._later: dict[Stored, tuple[ReadPlan, Tensor]] = {}  # the same, on meta: read after the rest
        self._elsewhere: list[str] = []  # names of the checkpoint that this stage's model lacks
        self._rest: Any = {}
        self._notes: list[str] = []

    def compare(self, model: nn.Module | None, target: Any = None, key: Any = None) -> None:
        """Check that everything can be loaded, before anything is changed. ``target``: takes the entry ``key`` by its
        ``load_state_dict``, in ``run``; a Zero1 then reads its tensors by itself."""
        self._model, self._target, self._key = model, target, key
        optimizer = target if isinstance(target, torch.optim.Optimizer) else None
        parameters, names = ((), None) if optimizer is None else parameters_of(optimizer, self._ctx, model)
        by_name: dict[str, Layout] = {} if model is None else layouts(model)
        saved: Mapping[str, Any] = {}
        by_name |= {name: cut for name, cut in zip(names or (), parameters, strict=False) if cut is not None}
        if model is not None and names is None:
            names = [name for name, _ in model.named_parameters()]
        source, cuts = self._source, _cuts_of(model)
        stage = (
            source.entries_of_all(cuts, names) if self._restaged else source.stage(self._pp_rank, self._tp_rank, cuts)
        )
        recut = model is None and optimizer is not None and self._tp_rank is None and not self._restaged
        if recut and (states := stage.states()) is not None:
            self._rest = stage.entries(self._fill, stage.bound() if self._sharded else ())
            self._rest[key] = cut_anew(states, optimizer, self._ctx, self._source.path)
            return
        if model is not None:
            saved = self._saved(model, stage)
            self._fit = Fit(model, saved, self._ctx, self._source.path, strict=self._strict)
        tensors = list(stage.of_parameters())
        bound = self._follow(tensors, by_name, parameters if model is None else (), saved)
        bound |= stage.bound(model=model is None) if self._sharded else {}
        bound |= {of.key: OF_SUMS for of in tensors if of.stored.where.endswith(f".{SUMS}")}
        alone = model is None and target is not None and self._restaged  # then the others may be left out
        for why in dict.fromkeys(bound.values()):
            if self._strict and (not alone or bound.get(key) == why):
                keys = ", ".join(dotted((key,)) for key in bound if bound[key] == why)
                raise CheckpointError(f"{why}. strict=False leaves {keys} out")
            self._notes.append(f"left out: {why}")
        for of in tensors:
            if isinstance(target, Zero1) and of.key == key and of.stored.first.shape:
                plan = self._plan(of.stored)
                self._later[of.stored] = plan, torch.empty(plan.shape, dtype=plan.dtype, device="meta")
        self._rest = stage.entries(self._fill, bound, model=model is None)
        if self._fit is not None:
            self._fit.verify()

    def _saved(self, model: nn.Module, stage: Stage) -> Mapping[str, Any]:
        """The saved state for this model: of its stage, or of all stages if that lacks some of its names."""
        saved, pp = {} if self._restaged else stage.model(self._fill), self._ctx.mesh.axes.get("pp", 1)
        wanted = model.state_dict(keep_vars=True).keys()
        if not self._sharded:
            saved = aligned(saved, set(wanted))
            return saved if pp == 1 else self._of_this_stage(saved, wanted)
        if not self._restaged and (self._source.pp == 1 or wanted <= saved.keys()):
            return saved
        every = model_of(self._source, _cuts_of(model))
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

    def _follow(
        self,
        tensors: Sequence[OfParameter],
        by_name: Mapping[str, Layout],
        by_number: Sequence[Layout | None],
        saved: Mapping[str, Any],
    ) -> dict[Any, str]:
        """Cut optimizers' tensors like their parameters. Returns by key why an entry cannot load: its tensors' cuts are
        not known, and the model's tensors, of ``saved``, are not cut as in the file."""
        unknown = set()
        for of in tensors:
            named, cut = bool(by_name and of.name), of.stored.cut
            want = by_name.get(of.name or "") if named else dict(enumerate(by_number)).get(of.number)
            if want is not None and isinstance(cut, Layout):
                if cut.shape == want.shape:
                    self._wants[of.stored] = want
            elif of.stored.first.shape:
                unknown.add(of.key)
        for name, stored in saved.items() if unknown else ():
            want = by_name.get(name)
            if want is not None and isinstance(stored, Stored) and not stored.kept(want, self._ctx.mesh):
                why = (
                    f"{self._source.path}: the model cuts {name!r} as {want}, the file as {stored.cut}, and which "
                    "parameters the optimizer's state belongs to is not on record: it was saved without the model, or "
                    "not made from model.named_parameters()"
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

    def run(self) -> Any:
        """Read, after ``compare``. Returns the entries that neither the model nor the target takes. Collective over
        the world."""
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
        if self._target is not None:
            with together(ctx), naming("load", path):
                self._give()
        # the model last, so that as little as possible can fail once it has changed
        with together(ctx), naming("load", path):
            if self._fit is not None:
                self._fit.run()
        with together(ctx):
            if self._fit is not None:
                self._notes += self._fit.finish()
            for note in self._notes if ctx.rank == 0 and not self._quiet else ():
                warnings.warn(note, stacklevel=3)
        return self._rest

    def _give(self) -> None:
        """Let the target take its entry out of those that were read, before the model is changed."""
        if self._key not in self._rest:
            raise ValueError(f"{self._source.path} has no entry {self._key!r}; it has {list(self._rest)}")
        saved, target = self._rest.pop(self._key), self._target
        if isinstance(target, torch.optim.Optimizer) and is_optimizer(saved):
            known = {} if self._model is None else dict(self._model.named_parameters(remove_duplicate=False))
            saved = fitted(target, saved, known)
        if isinstance(target, Zero1):
            target.load_outline(saved, {id(like): plan.fill_run for plan, like in self._later.values()})
        else:
            target.load_state_dict(saved)


def _cuts_of(model: nn.Module | None) -> Cuts:
    """The cuts of the model's parameters, for files that do not record cuts."""
    by_name = {} if model is None else layouts(model)
    cuts = {name: layout.cuts[0] for name, layout in by_name.items() if layout.cuts}
    specs = {name: cut.spec for name, cut in cuts.items() if cut.axes != ("ep",)}
    return lambda name, shape, m: specs.get(name)


# -- optimizers ---------------------------------------------------------------------------------------------
def parameters_of(
    optimizer: torch.optim.Optimizer, ctx: ParallelContext, model: nn.Module | None = None
) -> tuple[Sequence[Layout | None], list[str] | None]:
    """How the parameters are cut, in order, and their names if all have one: of their own, or those in ``model``."""
    params = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
    names = [*chain.from_iterable(group.get("param_names") or () for group in optimizer.param_groups)]
    layouts = [layout_of(p, ctx, f"parameter {i}") for i, p in enumerate(params)]
    if len(names) != len(params) and model is not None:
        known = {id(p): name for name, p in model.named_parameters()}
        names = [known[id(p)] for p in params if id(p) in known]
    return layouts, names if len(names) == len(params) else None


def cut_anew(states: Sequence[Mapping[str, Any]], optimizer: Any, ctx: ParallelContext, where: str) -> dict[str, Any]:
    """The state of ``optimizer`` on this rank, from the saved states of ``len(states)`` ranks. A saved value is cut
    like the parameter of its number. CheckpointError if groups or shapes are not those of this optimizer."""
    for state in states:
        if not is_optimizer(state):
            raise CheckpointError(f"{where} has no optimizer's state there, but {list(state)[:8]}")
    states = [renumbered(state, optimizer.param_groups, {}) for state in states]
    first = states[0]
    saved, here = ([group["params"] for group in groups] for groups in (first["param_groups"], optimizer.param_groups))
    sizes, wanted = [*map(len, saved)], [*map(len, here)]
    if sizes != wanted:
        raise CheckpointError(f"{where}: the saved optimizer has groups of {sizes} parameters, this one of {wanted}")
    params = dict(zip(chain(*saved), chain(*here), strict=True))
    recut: dict[Any, Any] = {}
    for index, values in first["state"].items():
        if index not in params or any(s["state"].get(index, {}).keys() != values.keys() for s in states):
            raise CheckpointError(f"{where}: the ranks hold different states of parameter {index}")
        want = layout_of(params[index], ctx, f"parameter {index}")
        recut[index] = {
            key: _value([s["state"][index][key] for s in states], want, ctx, f"{where}: state[{index}].{key}")
            for key in values
        }
    return {"state": recut, "param_groups": in_own_memory(first["param_groups"])}


def _value(values: list[Any], layout: Layout | None, ctx: ParallelContext, where: str) -> Any:
    """One value of a parameter's state. A tensor that has not the shape of the parameter's shard is uncut."""
    if not isinstance(values[0], Tensor):
        return values[0]
    m, shards = len(values), [mapped(value, "state", where) for value in values]
    cut = layout.cuts[0].spec if layout is not None and layout.cuts and layout.cuts[0].axes != ("ep",) else None
    if cut is not None and {s.shape for s in shards} == {cut.local_shape(m)}:
        shards = in_order(shards, cut, where)
    else:
        cut = layout = None
    stored = Stored.over_tp(where, cut, m, None, shards.__getitem__)
    return stored.plan(layout, ctx.rank, ctx.mesh).tensor()
