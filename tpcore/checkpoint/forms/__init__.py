"""Checkpoints that other libraries wrote."""
