"""Tokens that all ranks choose alike."""
