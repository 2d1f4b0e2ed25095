"""What a program would do, what a job did wrong, and what this machine has."""

from .replicas import check_replicas

__all__ = ["check_replicas"]
