"""What the command line does with checkpoints, without a job."""
