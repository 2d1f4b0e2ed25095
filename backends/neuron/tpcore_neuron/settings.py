"""The environment variables of the Neuron and XLA runtimes that the backend reads or sets."""

from __future__ import annotations

from tpcore.settings import Variable, one_of, whole

from .stand_in import limits

DEVICE = Variable("PJRT_DEVICE", str, "NEURON")
CORES = Variable("NEURON_RT_VISIBLE_CORES", str, "")
PAIRS = Variable("TPCORE_NEURON_PERMUTE", one_of({"native": False, "pairs": True}), False)
LOGICAL = Variable("NEURON_LOGICAL_NC_CONFIG", whole, 2)
LIMITS = Variable("TPCORE_NEURON_LIMITS", limits.of, frozenset[str]())
"""Set: the native backend runs on the stand-in, under the limits of this SDK, of these names, or none."""
HOST_CC = Variable("TORCH_NEURONX_ENABLE_HOST_CC", str, "")
CACHE = Variable("TORCH_NEURONX_NEFF_CACHE_DIR", str, "/tmp/neff_cache")
COMPILE_ONLY = Variable("TORCH_NEURONX_COMPILE_ONLY", str, "")
TARGET = Variable("NEURON_PLATFORM_TARGET_OVERRIDE", str, "trn2")
AUTOLOAD = Variable("TORCH_DEVICE_BACKEND_AUTOLOAD", str, "")
EXTRACT_ONLY = Variable("NEURON_EXTRACT_GRAPHS_ONLY", str, "")


def of_replicas(size: int, environment: dict[str, str]) -> dict[str, str]:
    """Variables of a process in which XLA:CPU has ``size`` devices. Set them before torch_xla is imported."""
    return {
        # the default is the number of cores; with fewer threads than waiting collectives none would end
        "XLA_THREAD_POOL_SIZE": environment.get("XLA_THREAD_POOL_SIZE", str(max(8, 2 * size))),
        # LLVM's optimizations take twice the time that they save in a test
        "XLA_FLAGS": environment.get("XLA_FLAGS", "--xla_backend_optimization_level=0"),
        DEVICE.name: "CPU",
        "CPU_NUM_DEVICES": str(size),
        # a program that may write to its inputs keeps them until it ends, and freeing an input would wait
        "XLA_ENABLE_PARAM_ALIASING": "0",
    }
