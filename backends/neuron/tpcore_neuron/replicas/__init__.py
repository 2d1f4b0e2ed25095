"""Real XLA programs with real collectives on N replicas in one process, for tests without hardware."""
