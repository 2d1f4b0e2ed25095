"""How much of tpcore one step passes through: functions, files and calls, counted once it has run before.

    python benchmarks/flows.py [--list]

Ranks are threads; rank 0 is counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext
from tpcore.testing import run_ranks

_ROOT = str(Path(tpcore.__file__).parent)
_INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")
Calls = Counter[CodeType]


def counted(flow: Callable[[], object]) -> Calls:
    """Calls of tpcore's functions on this thread, in the second of two runs."""
    flow()
    calls: Calls = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_ROOT):
            calls[frame.f_code] += 1

    sys.setprofile(profile)
    try:
        flow()
    finally:
        sys.setprofile(None)
    return calls


class Net(nn.Module):
    """Four tensors, of which one is the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = tpcore.ColumnParallelLinear(8, 16, gather_output=False)
        self.down = tpcore.RowParallelLinear(16, 8, input_is_parallel=True)


def of_rank_0(tp: int, make: Callable[[], Callable[[], object]]) -> Calls:
    def rank(ctx: ParallelContext) -> Calls:
        return counted(make())

    return run_ranks(Mesh({"tp": tp}), rank)[0]


def flows(folder: str) -> dict[str, Calls]:
    where = f"{folder}/checkpoint"

    def forward() -> Callable[[], object]:
        layer, x = tpcore.ColumnParallelLinear(8, 16), torch.randn(4, 8)
        return lambda: layer(x)

    def save() -> Callable[[], object]:
        state = Net().state_dict()
        return lambda: tpcore.checkpoint.save(state, where)

    def load() -> Callable[[], object]:
        net = Net()
        return lambda: tpcore.checkpoint.load(where, net)

    return {
        "column forward, gathered": of_rank_0(2, forward),
        "save, 4 tensors, 2 ranks": of_rank_0(2, save),
        "load, the same at 4 ranks": of_rank_0(4, load),
    }


def named(calls: Calls) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for code, n in calls.items():
        if code.co_name not in _INNER:
            found[code.co_filename[len(_ROOT) + 1 :], getattr(code, "co_qualname", code.co_name)] = n
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name each function")
    listed = parser.parse_args().list
    print(f"{'flow':28}{'functions':>10}{'files':>7}{'calls':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for title, calls in flows(folder).items():
            found = named(calls)
            print(f"{title:28}{len(found):10}{len({file for file, _ in found}):7}{sum(found.values()):7}")
            for (file, name), n in sorted(found.items()) if listed else ():
                print(f"    {file} {name} {n}")


if __name__ == "__main__":
    main()
