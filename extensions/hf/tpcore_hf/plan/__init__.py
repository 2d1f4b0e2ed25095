"""What is known about a model before it is sharded: rules for its modules, and one decision for each."""
