"""The job that this process is in: mesh, groups, random streams, and what its ranks agree on."""
