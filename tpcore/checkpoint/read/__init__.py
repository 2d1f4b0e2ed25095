"""From files to a model and an optimizer."""
