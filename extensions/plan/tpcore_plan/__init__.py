"""Which mesh: the time and memory of a step predicted for each, before anything is launched."""
