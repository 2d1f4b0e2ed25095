"""All benchmarks, one after the other: ``python -m benchmarks``."""

from __future__ import annotations

import subprocess
import sys

for name in (
    "import_time",
    "all_reduce",
    "mlp_block",
    "cross_entropy",
    "optimizer",
    "serve",
    "linears",
    "generate",
    "decoding",
    "transformers_tp",
    "load_model",
    "pipeline",
    "context",
):
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
