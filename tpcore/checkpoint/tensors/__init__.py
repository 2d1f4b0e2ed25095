"""One tensor of a checkpoint: its cut, and the bytes of its shards that a rank needs."""
