"""Operators over the parts of a tensor on all ranks, each in a module of its name."""
