"""Plans of families to which transformers gives none: one file for each way of building a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from ..plan import Rule

_FILES = {
    "bert": ("bert", "roberta", "camembert", "xlm-roberta", "electra"),
    "gpt2": ("gpt2",),
}


def file_of(model_type: str) -> str | None:
    """The module here that knows a family."""
    return next((file for file, kinds in _FILES.items() if model_type in kinds), None)


def rules_of(config: Any) -> Mapping[str, Rule]:
    """Rules of a family, named as in its base model or its stacks of layers; none for an unknown one."""
    file = file_of(getattr(config, "model_type", ""))
    if file is None:
        return {}
    rules: Callable[[Any], Mapping[str, Rule]] = import_module(f"{__name__}.{file}").rules
    return rules(config)
