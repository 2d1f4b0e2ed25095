"""Modules of NeuronX Distributed, by their paths."""
