"""Reports on how close a backend comes to the unsharded modules."""
