"""Checkpoints that can be loaded at any degree: safetensors and JSON, whole under their name or not there."""

from __future__ import annotations

from .api import latest, load, save, wait

__all__ = ["latest", "load", "save", "wait"]
