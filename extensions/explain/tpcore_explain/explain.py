"""Explains what one training step of a model does on a mesh, without starting a job."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, overload

import torch
from torch import nn

from tpcore.errors import counted
from tpcore.layout.mesh import Mesh
from tpcore.runtime.digests import Note
from tpcore.train.zero import Zero1

from .checked import difference_of
from .modules import ShardedModel, sharded_model
from .recording import Collective
from .step import MakeOptimizer, Parameter, Program, StageCost, record
from .target import AUTO, Factory, ModelInputs, build, function, rules_in, with_labels

__all__ = ["Collective", "Explanation", "Parameter", "Program", "ShardedModel", "StageCost", "explain"]

_MANY = 16  # up to this many ranks, all are recorded, and of more the corners of the mesh


@dataclass(frozen=True)
class Explanation:
    """The distinct programs, each with the ranks that run it: one if all do the same."""

    mesh: Mesh
    programs: tuple[tuple[tuple[int, ...], Program], ...]
    disagreement: str | None
    """The first place where the recorded ranks would hang or mix up numbers; None if there is none."""
    difference: str | None = None
    """The first random state or input in which ranks of one tp group differ; None if there is none."""

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Places where a step computes something else than the whole model would, with module and remedy."""
        texts = dict.fromkeys(text for _, program in self.programs for text in program.mistakes)
        return (*texts, *([] if self.difference is None else [self.difference]))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The recorded ranks."""
        return tuple(sorted(r for ranks, _ in self.programs for r in ranks))

    def program(self, rank: int) -> Program:
        for ranks, program in self.programs:
            if rank in ranks:
                return program
        raise ValueError(f"rank {rank} was not recorded; there are {list(self.ranks)}")

    def to_json(self) -> dict[str, Any]:
        programs = [{"ranks": list(ranks), **dataclasses.asdict(program)} for ranks, program in self.programs]
        for entry, (_, program) in zip(programs, self.programs, strict=True):
            for row, call in zip(entry["collectives"], program.collectives, strict=True):
                row["sent"] = call.sent
        return {
            "mesh": dict(self.mesh.axes),
            "torch": torch.__version__,
            "disagreement": self.disagreement,
            "mistakes": list(self.mistakes),
            "programs": programs,
        }


@overload
def explain(target: nn.Module) -> ShardedModel: ...  # type: ignore[overload-overlap]  # a module is a function too


@overload
def explain(target: str | Factory, **options: Any) -> Explanation: ...


def explain(  # type: ignore[misc]  # the options above are these
    target: str | Factory | nn.Module,
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    batch_size: int = 1,
    seq_len: int = 128,
    parallelize: str | Callable[[nn.Module], nn.Module | None] | None = None,
    plan: str | Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    context_parallel: str | None = None,
    dispatch: str = "gathered",
    capacity_factor: float | None = None,
    dtype: torch.dtype | None = None,
    optimizer: str | MakeOptimizer = "AdamW",
    master_dtype: torch.dtype | None = None,
    max_norm: float | None = 1.0,
    ranks: Sequence[int] | None = None,
) -> Explanation | ShardedModel:
    """Record a training step of every rank on ``meta`` tensors, and compare the ranks.

    Of a model that is sharded already, ``explain(model)`` is a table to ``print``: each parameter, its shape on this
    rank and of the whole, and how it is sharded or why it is not.

    ``target``: a function that returns a model with tpcore's layers, or ``(model, inputs)``; its name,
    ``package.module:function`` or ``path/to/file.py:function``; or a Hugging Face config: a directory, a
    ``config.json``, a model class of transformers. ``inputs``: a tensor, positional or keyword arguments, or a function
    ``loss(model)``. The function may take ``batch_size`` (of one dp rank) and ``seq_len``, and must not call
    ``tpcore.init``. ``pp`` above 1 needs a model with ``PipelinedLayers``.

    ``parallelize``: replaces layers of the model by tpcore's, in place, or returns another model. ``plan``, instead of
    it, for a model of transformers: rules that go before its own, a JSON file of such rules, or ``"auto"`` for its own,
    the default of a config at ``cp`` above 1; with ``sequence_parallel``, ``dispatch``, ``capacity_factor`` and
    ``context_parallel`` as of ``tpcore.parallelize``. ``dtype``: of parameters and inputs. ``optimizer``: a class of
    ``torch.optim``; ``zero1``, which is ``Zero1`` over AdamW, or ``zero1:SGD``; or a function of the parameters.
    ``master_dtype``: of ``Zero1``'s master weights. ``max_norm``: for clipping; None: none. ``ranks``: to record; by
    default all, and of more than 16 the first and the last along each axis.

    Raises ValueError for a target that cannot be built and for a step that reads values.
    """
    if isinstance(target, nn.Module):
        return sharded_model(target)
    mesh = Mesh({"pp": pp, "dp": dp, **({"ep": ep} if ep > 1 else {}), **({"cp": cp} if cp > 1 else {}), "tp": tp})
    change = function(parallelize) if isinstance(parallelize, str) else parallelize
    if plan is not None and change is not None:
        raise ValueError("parallelize and plan are two ways to cut a model: give one")
    keywords: dict[str, Any] = {"sequence_parallel": sequence_parallel or None, "context_parallel": context_parallel}
    keywords |= {"dispatch": None if dispatch == "gathered" else dispatch, "capacity_factor": capacity_factor}
    options = {name: value for name, value in keywords.items() if value is not None}
    if cp > 1 and plan is None and change is None and isinstance(target, str) and ":" not in target:
        plan = AUTO  # nothing else deals the tokens of a model of transformers
    if options and plan is None:
        raise ValueError(f"{' and '.join(options)} can only be given with a plan: plan='auto' is the model's own")
    if plan is not None:
        from tpcore_hf import parallelize as by_plan

        change = partial(by_plan, plan=rules_in(plan) if isinstance(plan, str) else plan, **options)

    def build_model() -> tuple[nn.Module, ModelInputs]:
        model, inputs = build(target, batch_size, seq_len)
        if plan is not None:
            model, inputs = model.to(dtype=dtype), with_labels(model, inputs)
        return (model if change is None else change(model) or model), inputs

    for rank in ranks or ():
        mesh.coords(rank)  # raises for a rank outside the mesh
    world, last = range(mesh.size), {axis: n - 1 for axis, n in mesh.axes.items()}
    if ranks is None and mesh.size > _MANY:
        ranks = [r for r in world if all(at in (0, last[axis]) for axis, at in mesh.coords(r).items())]
    recorded = world if ranks is None else sorted(set(ranks))
    make_optimizer = _optimizer(optimizer, master_dtype)
    record_rank = partial(record, build_model, mesh, dtype=dtype, optimizer=make_optimizer, max_norm=max_norm)
    records = {r: record_rank(r) for r in recorded}
    groups: dict[Program, list[int]] = {}
    for rank, (program, _) in records.items():
        groups.setdefault(program, []).append(rank)
    problem = _first_disagreement(mesh, {r: program.collectives for r, (program, _) in records.items()})
    difference = _difference(mesh, {r: notes for r, (_, notes) in records.items()}, lambda r: record_rank(r)[1])
    return Explanation(mesh, tuple((tuple(r), p) for p, r in groups.items()), problem, difference)


def _first_disagreement(mesh: Mesh, programs: Mapping[int, Sequence[Collective]]) -> str | None:
    """Run the ranks' collectives against each other; return a message about the first that hangs or differs. None if
    all fit. Only members in ``programs`` are compared. Two members agree if they make the same collective from the
    same module: with equal calls from different layers, one gets the other's numbers."""
    positions = dict.fromkeys(programs, 0)
    counts: Counter[tuple[int, ...]] = Counter()
    while True:
        waiting = {r: calls[positions[r]] for r, calls in programs.items() if positions[r] < len(calls)}
        if not waiting:
            return None
        groups = {r: mesh.group(*c.axes, within=c.size).members(r) for r, c in waiting.items()}
        for members in groups.values():
            present = [r for r in members if r in programs]
            if all(groups.get(r) == members for r in present):
                break
        else:
            lines = [
                f"  rank {r} waits for group {groups[r]}: {waiting[r]}"
                if r in waiting
                else f"  rank {r} has made all of its {counted(len(calls), 'collective')}"
                for r, calls in programs.items()
            ]
            return "the step would hang, its ranks waiting for one another:\n" + "\n".join(lines)
        signature, first = attrgetter("op", "shape", "dtype", "phase", "module"), present[0]
        other = next((r for r in present if signature(waiting[r]) != signature(waiting[first])), None)
        if other is not None:
            return (
                f"ranks {first} and {other} of group {members} disagree on collective #{counts[members]} of the "
                f"group:\n  rank {first}: {waiting[first]}\n  rank {other}: {waiting[other]}\n"
                "Every rank of a group must make the same collectives in the same order."
            )
        counts[members] += 1
        for rank in present:
            positions[rank] += 1


def _difference(mesh: Mesh, notes: Mapping[int, Sequence[Note]], again: Callable[[int], Sequence[Note]]) -> str | None:
    """The first difference between ranks of a tp group. None if ``again`` gives a rank other notes than before."""
    for group in mesh.group("tp").partition:
        ranks = [r for r in group if r in notes]
        difference = difference_of(ranks, [notes[r] for r in ranks]) if ranks else None
        if difference is not None and again(ranks[0]) == notes[ranks[0]]:
            return difference
    return None


def _optimizer(optimizer: str | MakeOptimizer, master_dtype: torch.dtype | None) -> MakeOptimizer:
    zero, _, name = optimizer.partition(":") if isinstance(optimizer, str) else ("", "", "")
    if zero.lower() == "zero1":
        cls = _class(name or "AdamW")
        return lambda params: Zero1(cls, params, master_dtype=master_dtype)
    if master_dtype is not None:
        raise ValueError("master_dtype is for optimizer='zero1': only Zero1 keeps master weights")
    return _class(optimizer) if isinstance(optimizer, str) else optimizer


def _class(name: str) -> type[torch.optim.Optimizer]:
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name!r}")
    return cls
