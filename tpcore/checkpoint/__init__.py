"""Checkpoints that can be loaded at any tp degree: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import latest, load, save, wait

if TYPE_CHECKING:
    from .dtensor import dtensor_state_dict

__all__ = ["dtensor_state_dict", "latest", "load", "save", "wait"]


def __getattr__(name: str) -> Any:
    if name == "dtensor_state_dict":  # torch's DTensor takes half a second to import
        from .dtensor import dtensor_state_dict

        return dtensor_state_dict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
