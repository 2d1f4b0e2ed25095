"""From programs and weights on the disk to a model that answers."""
