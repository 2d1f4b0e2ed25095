"""Contents of a checkpoint directory."""
