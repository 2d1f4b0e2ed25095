"""One training script, run by one process and by several ranks, and the first module in which they differ."""
