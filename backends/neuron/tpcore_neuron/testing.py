"""``tpcore_neuron.replicas`` by the name that tests import it."""

from __future__ import annotations

from .replicas import Collective, Program, lower, programs, run_replicas

__all__ = ["Collective", "Program", "lower", "programs", "run_replicas"]
