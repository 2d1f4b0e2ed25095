"""Checkpoints that can be loaded at any tp degree: safetensors and JSON, written whole or not at all."""

from __future__ import annotations

from .api import load, save, wait

__all__ = ["load", "save", "wait"]
