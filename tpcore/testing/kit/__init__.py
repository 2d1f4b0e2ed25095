"""The conformance kit: what every backend must do."""
