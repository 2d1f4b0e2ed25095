"""The conformance kit, by the name that backends' tests import it."""

from __future__ import annotations

from .kit.conformance import Conformance

__all__ = ["Conformance"]
