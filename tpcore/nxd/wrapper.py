"""What the published classes around a model have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


class Wrapper(nn.Module):
    """A model that is trained another way. Names of parameters and state, and what it lacks, are the model's inside."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self._original = (original,)  # in a tuple, for a subclass registers it under the name that is published

    def original_module(self) -> nn.Module:
        return self._original[0]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.original_module().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original_module().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return self.original_module().load_state_dict(state_dict, strict=strict, assign=assign)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "_original"):  # not there yet
                raise
            return getattr(self.original_module(), name)
