"""All benchmarks, one after the other: ``python -m benchmarks``; ``--tiny`` shows in minutes that each of them runs."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

TINY = {
    "import_time": "--rounds 1",
    "all_reduce": "--kb 1 100 --rounds 1 --warm 0",
    "mlp_block": "--size tiny --rounds 1 --warm 0",
    "cross_entropy": "--size tiny --rounds 1 --warm 0",
    "optimizer": "--size tiny --dp 2 --rounds 1 --steps 1 --warm 0",
    "muon": "--size tiny --rounds 1 --warm 0",
    "serve": "--size tiny --shapes 2x8 --rounds 1 --warm 0 --loads 1 --calls 20",
    "linears": "--rows 2 --layers 1 --hidden 64 --rounds 1",
    "generate": "--size tiny --rounds 2 --warm 1",
    "decoding": "--size tiny --rounds 1 --warm 1",
    "transformers_tp": "--size tiny --rounds 1 --steps 1 --warm 1",
    "load_model": "--size tiny --tp 2 4",
    "pipeline": "--pp 2 --microbatches 2 6 --rounds 1",
    "reproducible": "speed --size tiny --rounds 1",
    "context": "--tokens 256 --cp 1 2 --steps 1",
    "context --states --fits 1024": "--tokens 128 256 --cp 1 2 4",
}
"""Options of each, of a size at which times say nothing."""
FULL = {"reproducible": "speed", "context --states --fits 1024": "--tokens 512 1024 2048"}
"""Those that say what is measured."""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="sizes of a test: that it runs, not how fast")
    tiny = parser.parse_args().tiny
    for name, options in TINY.items():
        more = options if tiny else FULL.get(name, "")
        command = [sys.executable, "-m", *shlex.split(f"benchmarks.{name} {more}")]
        subprocess.run(command, check=True)
