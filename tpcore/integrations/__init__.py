"""Classes of other libraries, over a mesh of tpcore."""
