"""What ``import tpcore.parallel_layers`` finds."""

raise ImportError(
    "tpcore.parallel_layers is tpcore.nxd.parallel_layers now, and so are the other paths of NeuronX "
    "Distributed: write tpcore.nxd for neuronx_distributed, or run tpcore migrate --write"
)
