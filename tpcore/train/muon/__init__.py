"""Muon: orthogonalized updates of whole matrices, whatever rank has which part of them."""

from .optimizer import Muon

__all__ = ["Muon"]
