"""Writes models and optimizers to files."""
