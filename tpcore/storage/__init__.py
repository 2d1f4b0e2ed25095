"""Files, whole or not at all: what checkpoints and traced models are written with."""
