"""A model changed in place: its layers, forwards, logits, loss and figures."""
