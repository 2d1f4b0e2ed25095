"""Makes programs and weights on disk from a model."""
