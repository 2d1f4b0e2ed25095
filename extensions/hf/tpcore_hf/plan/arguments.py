"""What the forward of a model takes: the one place where models are asked for it, by names and never by versions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

CACHES = ("past_key_values", "cache")
"""What releases of transformers call keys and values of earlier tokens, in arguments and in outputs."""


def _signatures(module: nn.Module) -> Iterator[list[str]]:
    """Names of arguments of ``module.forward``, then, where it passes others on, of the classes above it."""
    above = [vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind)]
    for forward in (module.forward, *above):
        parameters = inspect.signature(forward).parameters.values()
        yield [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            return


def takes(module: nn.Module, name: str) -> bool:
    return any(name in names for names in _signatures(module))


def cache_argument(module: nn.Module) -> str | None:
    """The argument for keys and values of earlier tokens; None without one."""
    return next((name for names in _signatures(module) for name in CACHES if name in names), None)


def cache_of(output: Mapping[str, Any]) -> Any:
    """The keys and values in a model's output; None without any."""
    return next((value for name, value in output.items() if name in CACHES), None)


def named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by their names."""
    names = dict.fromkeys(name for names in _signatures(module) for name in names)
    return dict(zip(names, args, strict=False)) | dict(kwargs)
