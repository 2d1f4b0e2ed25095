"""Adapters of peft on a sharded model."""
