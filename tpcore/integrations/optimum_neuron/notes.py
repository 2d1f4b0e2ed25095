"""Options of optimum-neuron that need nothing here: each that is given says why, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...log import inform
from ...runtime.context import current

NOTES = {
    "kv_size_multiplier": "consecutive ranks hold the same key and value head where tp is above their number",
    "num_local_ranks_per_step": "each rank reads and writes its own part, one tensor at a time",
    "use_xser": "tensors are written one by one in safetensors",
    "half_precision_backend": "bf16 is autocast of torch on every backend",
    "autocast_backend": "bf16 is autocast of torch on every backend",
    "neuron_cc_optlevel": "the compiler takes it from NEURON_CC_FLAGS",
    "skip_cache_push": "no compiled program is sent anywhere",
    "stochastic_rounding_enabled": "the device takes it from NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "optimizer_save_master_weights_in_ckpt": "a Zero1's master weights are always saved with its state",
    "recompute_causal_mask": "models make their masks themselves",
    "transpose_nki_inputs": "attention is that of the model",
}


def note(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Print the line of every option that is given as something else than its default, on rank 0."""
    for name, value in given.items():
        if name in NOTES and value != defaults[name] and current().rank == 0:
            inform(f"{name}={value!r} needs nothing here: {NOTES[name]}")


def send_example_telemetry(*args: Any, **kwargs: Any) -> None:
    """Nothing, where scripts call what transformers had before 5: no telemetry is sent."""
