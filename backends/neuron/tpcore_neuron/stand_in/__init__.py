"""A stand-in for AWS's native PyTorch on any CPU: the device ``neuron``, and its collectives under their limits."""
