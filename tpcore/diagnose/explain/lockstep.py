"""Compares the recorded ranks' collectives: would they hang or mix up data?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...layout.mesh import Mesh
from .recording import Collective

Programs = Mapping[int, Sequence[Collective]]
Members = tuple[int, ...]


def first_disagreement(mesh: Mesh, programs: Programs) -> str | None:
    """Run the ranks' collectives against each other; return a message about the first that hangs or differs.

    None if all fit. Only members in ``programs`` are compared. Two members agree if they make the same
    collective from the same module: with equal calls from different layers, one gets the other's numbers.
    """
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


def _key(call: Collective) -> tuple[object, ...]:
    return call.op, call.shape, call.dtype, call.phase, call.module


def _unlike(members: Members, calls: Mapping[int, Collective], position: int) -> str | None:
    first = next(iter(calls))
    for rank, call in calls.items():
        if _key(call) != _key(calls[first]):
            return (
                f"ranks {first} and {rank} of group {members} disagree on collective #{position} of the "
                f"group:\n  rank {first}: {calls[first]}\n  rank {rank}: {call}\n"
                "Every rank of a group must make the same collectives in the same order."
            )
    return None


def _stuck(programs: Programs, waiting: Mapping[int, Collective], groups: Mapping[int, Members]) -> str:
    lines = []
    for rank, calls in programs.items():
        if rank in waiting:
            lines.append(f"  rank {rank} waits for group {groups[rank]}: {waiting[rank]}")
        else:
            lines.append(f"  rank {rank} has made all of its {len(calls)} collectives")
    return "the step would hang, its ranks waiting for one another:\n" + "\n".join(lines)
