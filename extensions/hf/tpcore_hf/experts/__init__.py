"""Layers of experts, and who sees which tokens."""
