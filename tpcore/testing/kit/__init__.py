"""The conformance kit: tests that every backend must pass."""
