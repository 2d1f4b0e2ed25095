"""Checkpoints that can be loaded at any degree: safetensors and JSON, whole under their name or not there."""

from __future__ import annotations

from .api import load, save, wait

__all__ = ["load", "save", "wait"]
