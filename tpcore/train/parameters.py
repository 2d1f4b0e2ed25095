"""The parameters that a caller names, each once."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

Parameters = nn.Module | Tensor | Iterable[Tensor]


def unique_parameters(parameters: Parameters) -> list[Tensor]:
    """Every parameter once, tied ones included; generators may be given."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    return list({id(p): p for p in parameters}.values())
