"""What a program would do, what a job did wrong, and what this machine has."""
