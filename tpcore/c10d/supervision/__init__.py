"""Which ranks of a job are lost, and which disagree: named on all others, within seconds."""
