"""One tensor of a checkpoint: how it is cut, and which bytes of which shard a rank needs."""
