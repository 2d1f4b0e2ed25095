"""The end of a training step: mean over data parallel, clipping, the optimizer."""
