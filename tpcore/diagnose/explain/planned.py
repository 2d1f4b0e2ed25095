"""A model of transformers that is cut by a plan before its step is recorded."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...checkpoint.storage.files import read_file
from .target import Inputs

AUTO = "auto"


def by_plan(plan: str | Mapping[str, Any], **options: Any) -> Callable[[nn.Module], nn.Module]:
    """A function that cuts a model as ``tpcore.parallelize`` does, with its ``options``."""
    from ...models import parallelize

    return partial(parallelize, plan=rules_in(plan) if isinstance(plan, str) else plan, **options)


def rules_in(plan: str) -> dict[str, str]:
    """The rules that go before a model's own: none for ``auto``, else those of a JSON file."""
    if plan == AUTO:
        return {}
    path = Path(plan)
    if not path.is_file():
        raise ValueError(f"plan {plan!r} is no file: name a JSON file of rules, or {AUTO!r} for the model's own")
    rules = json.loads(read_file(str(path)))
    if not isinstance(rules, dict) or not all(isinstance(style, str) for style in rules.values()):
        raise ValueError(f'{path} is no plan: it has to be a dict like {{"model.layers.*.mlp": "replicate"}}')
    return rules


def with_labels(model: Any, inputs: Inputs) -> Inputs:
    """``inputs`` with labels, where the model makes a loss of them: logits then need not be gathered."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids")) if isinstance(inputs, Mapping) else None
    takes = "labels" in inspect.signature(model.forward).parameters
    if not isinstance(ids, Tensor) or not takes or model.get_output_embeddings() is None:
        return inputs
    return {**inputs, "labels": ids}  # type: ignore[dict-item]
