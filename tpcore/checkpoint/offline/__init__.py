"""Operations of the command line on checkpoints, without a job."""
