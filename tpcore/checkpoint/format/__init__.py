"""What a checkpoint directory holds."""
