"""How soon the other ranks name one that ends or is stopped at a step of a sum.

``PYTHONPATH=tests python -m helpers.lost_ranks``
It prints a table, and exits with status 1 if a rank is not named by all others, is named late, or leaves a
process behind. ``--times 5`` runs each case so often; a cell is the slowest of them all.
"""

from __future__ import annotations

import argparse
import sys
from tempfile import TemporaryDirectory

import psutil

from helpers.endings import ENDS, STEPS, STOPPED, Tiny, ends_at, names
from helpers.rank_pool import RankPool
from tpcore.layout.mesh import Mesh

LATE = 3.0  # seconds; for a stopped rank, which may go on at any time, seconds after the time-out
TIMEOUT = 2.0  # of the collectives that a stopped rank does not come to
WORLDS = (2, 4)


def say(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n" if len(cells) > 1 else f"{cells[0]}\n")
    sys.stdout.flush()


def named(pool: RankPool, road: str, step: str, how: str, world: int, problems: list[str]) -> float:
    """Seconds until all other ranks had the name."""
    with TemporaryDirectory() as folder:
        outcomes = pool.outcomes(
            Mesh({"tp": world}),
            ends_at,
            how,
            step,
            folder,
            timeout=TIMEOUT if how == STOPPED else 60.0,
            env={"TPCORE_SHM": str(int(road == "shared memory"))},
        )
    slowest = 0.0
    for rank, outcome in enumerate(outcomes[:-1]):
        said, seconds = outcome.value or (f"{type(outcome.error).__name__}: {outcome.error}", 0.0)
        slowest = max(slowest, seconds)
        if not names(said, world - 1, how):
            problems.append(f"{road}, {step}, {how}, rank {rank} of {world}: {said}")
    if slowest > LATE + (TIMEOUT if how == STOPPED else 0.0):
        problems.append(f"{road}, {step}, {how}, {world} ranks: named after {slowest:.1f} s")
    return slowest


def table(pool: RankPool, times: int, problems: list[str]) -> int:
    """Print it; the number of losses."""
    hows, losses = [*ENDS, STOPPED], 0
    say("transport", "ranks", "step", *hows)
    say(*["---"] * (3 + len(hows)))
    for road, steps in STEPS.items():
        for world in WORLDS:
            for step in steps:
                cells = [max(named(pool, road, step, how, world, problems) for _ in range(times)) for how in hows]
                losses += times * len(hows)
                say(road, str(world), step, *(f"{c:.2f}" for c in cells))
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3)
    times, problems = parser.parse_args().times, list[str]()
    with RankPool(max(WORLDS), backend=Tiny) as pool:
        before = len(psutil.Process().children(recursive=True))
        losses = table(pool, times, problems)
        left = len(psutil.Process().children(recursive=True)) - before
    say(f"\n{losses} losses; {len(problems)} not named or late; {left} processes left behind.")
    say(f"Seconds until all others had raised. Those of a stopped rank include a time-out of {TIMEOUT:g} s.")
    for problem in problems:
        say(problem)
    return int(bool(problems or left))


if __name__ == "__main__":
    sys.exit(main())
