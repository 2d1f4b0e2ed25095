"""The timeline of a ring over two hosts, with permutes that block and with permutes under way while ranks compute.

Forward and backward of one attention with cp 2, one rank on each of two network namespaces, on a wire with a delay and
a rate: 10 Mbit/s are to a core of a CPU what 100 Gbit/s are to 300 TFLOP/s. Needs root, iproute2 and /dev/net/tun, as
``benchmarks.plan_hosts``; ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from .harness import conditions, say
from .plan_hosts import HOSTS, on_hosts

COLOURS = {"compute": "#4c78a8", "start": "#f2a541", "wait": "#d9534f"}
MEANING = {"compute": "computes a block", "start": "starts to send, or sends", "wait": "waits"}


def measured(delay: float, rate: float, tokens: int) -> list[dict[str, Any]]:
    """Of each rank, by way."""
    with tempfile.TemporaryDirectory() as home:
        on_hosts("ringtimes:rank", (home, tokens), per_host=1, delay=delay, rate=rate)
        times = import_module("ringtimes")  # of the hosts' drills: on_hosts has put it in the path
        return [times.read(Path(home), number) for number in range(HOSTS)]


def draw(events_of: list[dict[str, Any]], title: str, path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    rows = [(f"{way}, rank {number}", ranks[way]) for way in events_of[0] for number, ranks in enumerate(events_of)]
    figure, axes = plt.subplots(figsize=(9, 2.6))
    for at, (_, events) in enumerate(rows):
        for name, begin, end in events:
            axes.barh(at, (end - begin) * 1e3, left=begin * 1e3, height=0.7, color=COLOURS[name])
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=9)
    handles = [Patch(color=COLOURS[name]) for name in MEANING]
    axes.legend(handles, MEANING.values(), fontsize=8, loc="upper right")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay", type=float, default=5.0, help="milliseconds one way")
    parser.add_argument("--rate", type=float, default=10.0, help="Mbit that a host sends in a second")
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank")
    parser.add_argument("--plot", type=Path, help="a .svg or .png")
    options = parser.parse_args()
    os.environ.setdefault("TPCORE_CHECK", "off")  # comparing calls waits for the other rank in each start
    events_of = measured(options.delay / 1e3, options.rate * 1e6, options.tokens)
    wire = f"{options.rate:g} Mbit/s and {options.delay:g} ms each way"
    say(f"2 hosts, {wire}, {options.tokens:,} tokens a rank\n")
    say("| permutes | rank | computes | starts and waits | all |\n|---|---:|---:|---:|---:|")
    for way in events_of[0]:
        for number, ranks in enumerate(events_of):
            times = {name: sum(e - b for what, b, e in ranks[way] if what == name) * 1e3 for name in MEANING}
            last = max(end for _, _, end in ranks[way]) * 1e3
            others = times["start"] + times["wait"]
            say(f"| {way} | {number} | {times['compute']:.3g} ms | {others:.3g} ms | {last:.3g} ms |")
    if options.plot is not None:
        draw(events_of, f"A ring over two hosts, {wire}", options.plot)
    sys.stdout.write("\n")
    say(conditions(HOSTS))


if __name__ == "__main__":
    main()
