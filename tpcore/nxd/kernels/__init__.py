"""Names of NeuronX Distributed's attention kernels, by their paths. New code calls torch's attention."""
