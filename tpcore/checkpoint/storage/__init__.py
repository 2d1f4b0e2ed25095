"""Files and directories that appear whole or not at all. Checkpoints and traced models are built on them."""
