"""Collectives of one group: the table of primitives, checks, graph operators, differentiable mappings."""
