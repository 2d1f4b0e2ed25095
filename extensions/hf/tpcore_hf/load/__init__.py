"""Tensors between a model and files of transformers."""
