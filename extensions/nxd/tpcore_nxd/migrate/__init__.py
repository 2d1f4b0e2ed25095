"""Scripts for other libraries: what changes in them, line by line, and their imports rewritten."""
