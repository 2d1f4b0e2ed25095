"""The information that a transformers model has about itself: its plan, its vocabulary, its tied tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from . import families, plan
from .cuts import is_linear
from .plan import Rule, normalized, rule_of, wildcard


def checked_model(model: Any) -> Any:
    """``model``, if it is one of transformers; TypeError otherwise."""
    try:
        from transformers import PreTrainedModel
    except ImportError as e:
        raise ImportError("tpcore.parallelize needs transformers: pip install 'tpcore[hf]'") from e
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"parallelize takes a model of transformers, not a {type(model).__name__}; build a model of your "
            "own of tpcore's layers"
        )
    return model


def rules_of(model: Any, user: dict[str, Rule]) -> dict[str, Rule]:
    """The rules of ``user``, which override the model's plan, its family's rules and its vocabulary's.

    ValueError if they cut no block: then all ranks would compute the same.
    """
    why = families.REFUSED.get(model.config.model_type)
    if why is not None and not user:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) cannot be cut by its plan: {why}; say how "
            "to cut it, parallelize(model, plan={...})"
        )
    rules = normalized(own_rules(model)) | normalized(user)
    ends = {wildcard(name) for name, module in model.named_modules() if module in vocabulary(model)}
    if not any(
        rule not in (plan.REPLICATE, plan.SUMMED) and name not in ends for name, rule in rules.items()
    ):
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) has no plan of its own and its family is "
            "not known: say how to cut it, parallelize(model, plan={'layers.*.fc1': 'colwise', "
            "'layers.*.fc2': 'rowwise'})"
        )
    return _vocabulary(model, rules)


def own_rules(model: Any) -> dict[str, Rule]:
    """The rules of the model's plan and of the families of all transformers models inside it."""
    names = {wildcard(name) for name, _ in model.named_modules()}
    names |= {wildcard(name) for name, _ in model.named_parameters()}
    rules: dict[str, Rule] = {k: v for k, v in (getattr(model, "tp_plan", None) or {}).items() if k in names}
    for prefix, part in _pretrained(model):
        own = families.rules_of(part.config)
        rules |= {prefix + name: rule for name, rule in own.items() if wildcard(prefix) + name in names}
    return rules


def _pretrained(model: Any) -> Iterator[tuple[str, Any]]:
    """(prefix of names, module) of each transformers model inside, itself included."""
    kind = next(k for k in type(model).__mro__ if k.__name__ == "PreTrainedModel")
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield f"{name}." if name else "", module


def vocabulary(model: Any) -> tuple[Any, Any]:
    """(embedding of the input tokens, head that computes logits); None for one that is missing."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        table = None
    head = model.get_output_embeddings()
    return (
        table if isinstance(table, nn.Embedding) else None,
        head if isinstance(head, nn.Module) and is_linear(head) else None,
    )


def _vocabulary(model: Any, rules: dict[str, Rule]) -> dict[str, Rule]:
    """``rules``, with the embedding, the head and all modules tied to them cut by the vocabulary."""
    names = {id(module): name for name, module in model.named_modules()}
    table, head = vocabulary(model)
    styles = ((table, plan.EMBEDDING_ROW), (head, plan.COLUMN_GATHERED))
    for module, style in styles:
        if module is not None and rule_of(names[id(module)], rules) is None:
            rules[names[id(module)]] = style
    tied = {
        id(p)
        for name, module in model.named_modules()
        if rule_of(name, rules) == plan.EMBEDDING_ROW
        for p in module.parameters(recurse=False)
    }
    for name, module in model.named_modules():
        shares = any(id(p) in tied for p in module.parameters(recurse=False))
        if shares and rule_of(name, rules) is None:
            rules[name] = plan.EMBEDDING_ROW if isinstance(module, nn.Embedding) else plan.COLUMN_GATHERED
    return rules
