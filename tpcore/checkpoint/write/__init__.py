"""From a model and an optimizer to files."""
