"""From a model to programs and weights on the disk."""
