"""Tokens of a sequence on several ranks, between the layers of a model."""
