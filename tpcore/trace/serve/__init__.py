"""Serves a traced model from its programs and weights on disk."""
