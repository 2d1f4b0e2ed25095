"""What NeuronX Distributed has instead of functions of transformers, by their paths."""
