"""Reads files into models and optimizers."""
