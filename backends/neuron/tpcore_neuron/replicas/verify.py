"""``tpcore verify`` without hardware: the same checks of the neuron backend, on replicas of XLA:CPU.

python -m tpcore_neuron.replicas.verify 2 neuron-tp2.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tpcore
from tpcore_explain.verify.report import Report, checked

from ..backend import NeuronBackend, as_on_neuron
from ..testing import run_replicas

NOTE = """\
Measured on replicas of XLA:CPU in one process, **not on Neuron hardware**: the programs that the Neuron
compiler would be given, run with real collectives by the arithmetic of a CPU. What Neuron's compiler and
chips make of them is not measured here. float64 is left out, since Neuron has none."""


def verify(tp: int) -> Report:
    """The report of ``tpcore verify --backend neuron --tp N``, from N replicas in place of NeuronCores."""
    report: Report = run_replicas(_on_replica, tp, tp, timeout=300.0)[0]
    return report


def _on_replica(tp: int) -> Report:
    torch.set_num_threads(1)
    backend = NeuronBackend()
    backend.capabilities = as_on_neuron(backend.capabilities)  # type: ignore[misc]  # of this instance
    ctx = tpcore.init(backend, tp=tp)
    try:
        return checked(ctx, "neuron", NOTE)
    finally:
        tpcore.shutdown()


if __name__ == "__main__":
    report = verify(int(sys.argv[1]))
    Path(sys.argv[2]).write_text(report.to_json())
    sys.exit("\n".join(report.wrong) or 0)
