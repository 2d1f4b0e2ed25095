"""Other libraries' checkpoints read, and checkpoints of any form examined and rewritten."""
