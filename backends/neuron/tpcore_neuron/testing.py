"""``tpcore_neuron.replicas``, under the name that tests import."""

from __future__ import annotations

from .replicas import HloCollective as Collective
from .replicas import HloProgram as Program
from .replicas import lower, programs, run_replicas

__all__ = ["Collective", "Program", "lower", "programs", "run_replicas"]
