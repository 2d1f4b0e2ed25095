"""A cut optimizer as a GradScaler sees it."""

from __future__ import annotations

from typing import Any


class Scaled:
    """A Zero1 for a GradScaler: the groups of chunks with their gradients, and the step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._optimizer.base().param_groups
        return groups

    def step(self) -> Any:
        return self._optimizer.step()
