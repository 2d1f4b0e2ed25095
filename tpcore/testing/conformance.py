"""The conformance kit, under the name that backends' tests import."""

from __future__ import annotations

from ..errors import extra

with extra("testing", __name__):
    from .kit.conformance import Conformance

__all__ = ["Conformance"]
