"""Explains what one training step of a model does on a mesh, without starting a job."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...layout.mesh import Mesh
from ...runtime.consensus import Note, first_difference
from ...train.zero import Zero1
from .planned import AUTO, by_plan, with_labels
from .recording import Collective
from .stages import StageCost
from .step import MakeOptimizer, Parameter, Program, record
from .target import Factory, Inputs, build, function

__all__ = ["Collective", "Explanation", "Parameter", "Program", "StageCost", "explain"]

Members = tuple[int, ...]
_MANY = 16  # up to this many ranks, all are recorded


@dataclass(frozen=True)
class Explanation:
    """The distinct programs, each with the ranks that run it. There is one if all ranks do the same."""

    mesh: Mesh
    programs: tuple[tuple[tuple[int, ...], Program], ...]
    disagreement: str | None
    """The first place where the recorded ranks would hang or mix up numbers; None if there is none."""
    difference: str | None = None
    """The first random state or input in which ranks of one tp group differ; None if there is none."""

    @property
    def mistakes(self) -> tuple[str, ...]:
        """Places where a step computes something else than the whole model would, with module and remedy."""
        found = [text for _, program in self.programs for text in program.mistakes]
        return tuple(dict.fromkeys([*found, *([] if self.difference is None else [self.difference])]))

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
        programs = []
        for ranks, program in self.programs:
            entry = dataclasses.asdict(program)
            for made, call in zip(entry["collectives"], program.collectives, strict=True):
                made["sent"] = call.sent
            programs.append({"ranks": list(ranks), **entry})
        return {
            "mesh": dict(self.mesh.axes),
            "torch": torch.__version__,
            "disagreement": self.disagreement,
            "mistakes": list(self.mistakes),
            "programs": programs,
        }


def explain(
    target: str | Factory,
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
) -> Explanation:
    """Record a training step of every rank on ``meta`` tensors, and compare the ranks.

    ``target``: a function that returns a model with tpcore's layers, or ``(model, inputs)``; or its name,
    ``package.module:function`` or ``path/to/file.py:function``; or a Hugging Face config: a directory, a
    ``config.json``, a model class of transformers. ``inputs``: a tensor, positional or keyword arguments, or a function
    ``loss(model)``. The target function may take ``batch_size`` (of one dp rank) and ``seq_len``; it must not call
    ``tpcore.init``. With ``pp`` above 1 the model needs ``PipelinedLayers``, and each program includes the costs of its
    stage.

    ``parallelize``: replaces layers of the model by tpcore's, in place, or returns another model. ``plan``: instead of
    it, for a model of transformers: rules that go before its own, as ``tpcore.parallelize`` takes them, a JSON file of
    such rules, or ``"auto"`` for the model's own; with ``sequence_parallel``, ``dispatch`` and ``capacity_factor``,
    and, at ``cp`` above 1, ``context_parallel``; a Hugging Face config is cut by ``"auto"`` there. ``dtype``:
    parameters and inputs are converted to it. ``optimizer``: a class of ``torch.optim``; ``zero1``, which is ``Zero1``
    over AdamW, or ``zero1:SGD`` over another; or a function of the parameters. ``master_dtype``: dtype of ``Zero1``'s
    master weights. ``max_norm``: for clipping; None: none. ``ranks``: the ranks to record; by default all, and of more
    than 16 the first and the last along each axis.

    Raises ValueError for a target that cannot be built and for a step that reads values. Errors of the model pass
    through.
    """
    mesh = Mesh({"pp": pp, "dp": dp, **({"ep": ep} if ep > 1 else {}), **({"cp": cp} if cp > 1 else {}), "tp": tp})
    change = function(parallelize) if isinstance(parallelize, str) else parallelize
    if plan is not None and change is not None:
        raise ValueError("parallelize and plan are two ways to cut a model: give one")
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "context_parallel": context_parallel}
    options |= {} if dispatch == "gathered" else {"dispatch": dispatch}
    options |= {} if capacity_factor is None else {"capacity_factor": capacity_factor}
    if cp > 1 and plan is None and change is None and isinstance(target, str) and ":" not in target:
        plan = AUTO  # nothing else deals the tokens of a model of transformers
    given = [name for name, value in options.items() if value]
    if given and plan is None:
        raise ValueError(f"{' and '.join(given)} can only be given with a plan: plan='auto' is the model's own")
    if plan is not None:
        change = by_plan(plan, **options)

    def made() -> tuple[nn.Module, Inputs]:
        model, inputs = build(target, batch_size, seq_len)
        if plan is not None:
            model, inputs = model.to(dtype=dtype), with_labels(model, inputs)
        return (model if change is None else change(model) or model), inputs

    for rank in ranks or ():
        mesh.coords(rank)  # raises for a rank outside the mesh
    chosen = _corners(mesh) if ranks is None else sorted(set(ranks))
    make = _optimizer(optimizer, master_dtype)
    take = partial(record, made, mesh, dtype=dtype, optimizer=make, max_norm=max_norm)
    found = {r: take(r) for r in chosen}
    alike: list[tuple[list[int], Program]] = []
    for rank, (program, _) in found.items():
        same = [r for r, other in alike if other == program]
        if same:
            same[0].append(rank)
        else:
            alike.append(([rank], program))
    problem = _first_disagreement(mesh, {r: one.program.collectives for r, one in found.items()})
    differs = _difference(mesh, {r: one.notes for r, one in found.items()}, lambda r: take(r).notes)
    return Explanation(mesh, tuple((tuple(r), p) for r, p in alike), problem, differs)


def _first_disagreement(mesh: Mesh, programs: Mapping[int, Sequence[Collective]]) -> str | None:
    """Run the ranks' collectives against each other; return a message about the first that hangs or differs. None if
    all fit. Only members in ``programs`` are compared. Two members agree if they make the same collective from the
    same module: with equal calls from different layers, one gets the other's numbers."""
    done = dict.fromkeys(programs, 0)
    made: Counter[Members] = Counter()
    while True:
        waiting = {r: calls[done[r]] for r, calls in programs.items() if done[r] < len(calls)}
        if not waiting:
            return None
        groups = {r: mesh.group(*c.axes, within=c.size).members(r) for r, c in waiting.items()}
        for members in groups.values():
            present = [r for r in members if r in programs]
            if all(groups.get(r) == members for r in present):
                break
        else:
            return _stuck(programs, waiting, groups)
        message = _unlike(members, {r: waiting[r] for r in present}, made[members])
        if message is not None:
            return message
        made[members] += 1
        for rank in present:
            done[rank] += 1


def _unlike(members: Members, calls: Mapping[int, Collective], position: int) -> str | None:
    first = next(iter(calls))
    of = attrgetter("op", "shape", "dtype", "phase", "module")
    for rank, call in calls.items():
        if of(call) != of(calls[first]):
            return (
                f"ranks {first} and {rank} of group {members} disagree on collective #{position} of the "
                f"group:\n  rank {first}: {calls[first]}\n  rank {rank}: {call}\n"
                "Every rank of a group must make the same collectives in the same order."
            )
    return None


def _stuck(
    programs: Mapping[int, Sequence[Collective]], waiting: Mapping[int, Collective], groups: Mapping[int, Members]
) -> str:
    lines = []
    for rank, calls in programs.items():
        if rank in waiting:
            lines.append(f"  rank {rank} waits for group {groups[rank]}: {waiting[rank]}")
        else:
            lines.append(f"  rank {rank} has made all of its {len(calls)} collectives")
    return "the step would hang, its ranks waiting for one another:\n" + "\n".join(lines)


def _difference(mesh: Mesh, notes: Mapping[int, Sequence[Note]], again: Callable[[int], Sequence[Note]]) -> str | None:
    """The first difference between ranks of a tp group. None if ``again`` gives a rank other notes than before."""
    for group in mesh.group("tp").partition:
        ranks = [r for r in group if r in notes]
        found = first_difference(ranks, [notes[r] for r in ranks]) if ranks else None
        if found is not None and again(ranks[0]) == notes[ranks[0]]:
            return found
    return None


def _corners(mesh: Mesh) -> list[int]:
    if mesh.size <= _MANY:
        return list(range(mesh.size))
    ends = [sorted({0, size - 1}) for size in mesh.axes.values()]
    wanted = {tuple(at) for at in itertools.product(*ends)}
    return [r for r in range(mesh.size) if tuple(mesh.coords(r).values()) in wanted]


def _optimizer(chosen: str | MakeOptimizer, master_dtype: torch.dtype | None) -> MakeOptimizer:
    zero, _, name = chosen.partition(":") if isinstance(chosen, str) else ("", "", "")
    if zero.lower() == "zero1":
        cls = _class(name or "AdamW")
        return lambda params: Zero1(cls, params, master_dtype=master_dtype)
    if master_dtype is not None:
        raise ValueError("master_dtype is for optimizer='zero1': only Zero1 keeps master weights")
    return _class(chosen) if isinstance(chosen, str) else chosen


def _class(name: str) -> type[torch.optim.Optimizer]:
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"torch.optim has no optimizer {name!r}")
    return cls
