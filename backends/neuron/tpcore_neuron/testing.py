"""``tpcore_neuron.replicas``, under the name that tests import."""

from __future__ import annotations

from .replicas.api import lower, programs, run_replicas
from .replicas.stablehlo import HloCollective as Collective
from .replicas.stablehlo import HloProgram as Program

__all__ = ["Collective", "Program", "lower", "programs", "run_replicas"]
