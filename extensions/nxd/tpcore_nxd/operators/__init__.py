"""Operators over the parts of a tensor on all ranks, each in a module of its name."""

from .. import marks as marks  # of a script that imports any of them, marks on parameters are read
