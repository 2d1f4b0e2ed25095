"""The information that a transformers model has about itself: its plan, its vocabulary, its tied tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from tpcore.errors import extra

from . import families
from . import rules as plan
from .decisions import is_linear
from .found import BESIDE, COMPARED, found
from .rules import Rule, rule_of, wildcard

_ALONE = "a cut one was not compared with the whole"

REFUSED = {
    "llama4": "it is several models in one, which were not compared with the whole after a cut",
    **dict.fromkeys(("gemma4_vision", "muse_glimmer_assistant", "muse_glimmer_vision"), _ALONE),
}
"""Families whose own plan is wrong, or was not compared, with the reason."""


def checked_model(model: Any) -> Any:
    """``model``, if it is one of transformers; TypeError otherwise."""
    with extra("hf", "tpcore.parallelize"):
        from transformers import PreTrainedModel
    if not isinstance(model, PreTrainedModel):
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        inside = next((name for name, module in modules if isinstance(module, PreTrainedModel)), None)
        raise TypeError(
            f"parallelize takes a model of transformers, not a {type(model).__name__}"
            + (": build one of your own of tpcore's layers" if inside is None else f": pass model.{inside}")
        )
    return model


def rules_of(model: Any, user: dict[str, Rule], *, sequence_parallel: bool = False) -> dict[str, Rule]:
    """The rules of ``user``, which override the model's plan, its family's rules and its vocabulary's. What these leave
    is found in the model's structure, but with ``sequence_parallel``, under which towers beside a language model stay
    whole. ValueError if no block is sharded: then all ranks would compute the same."""
    why = REFUSED.get(model.config.model_type)
    if why is not None and not user:
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) cannot be sharded by its plan: {why}; say how "
            "to cut what else it has, parallelize(model, plan={...})"
        )
    rules = own_rules(model) | user
    if model.config.model_type in COMPARED and not (sequence_parallel and rules):
        rules = found(model, rules, vocabulary(model)) | rules
    ends = {wildcard(name) for name, module in model.named_modules() if module in vocabulary(model)}
    if not any(rule not in (plan.REPLICATE, plan.SUMMED) and name not in ends for name, rule in rules.items()):
        kinds = {type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Experts")}
        experts = f", and layers of experts ({', '.join(sorted(kinds))}) are not sharded yet" if kinds else ""
        proposed = found(model, rules, vocabulary(model))
        raise ValueError(
            f"{type(model).__name__} ({model.config.model_type}) has no plan of its own and its family is "
            f"not known{experts}: parallelize(model, plan=...) says how to shard its linear layers. By their sizes "
            f"it would be plan={proposed}, which was not compared with the whole"
        )
    return _vocabulary(model, rules)


def own_rules(model: Any) -> dict[str, Rule]:
    """The rules of the model's plan and of the families of all transformers models inside it."""
    from transformers import PreTrainedModel

    names = {wildcard(name) for name, _ in model.named_modules()}
    names |= {wildcard(name) for name, _ in model.named_parameters()}
    rules: dict[str, Rule] = {k: v for k, v in (getattr(model, "tp_plan", None) or {}).items() if wildcard(k) in names}
    for prefix, part in model.named_modules():
        of_family = families.rules_of(part.config) if isinstance(part, PreTrainedModel) else {}
        of_model = {f"{prefix}.{name}".removeprefix("."): rule for name, rule in of_family.items()}
        rules |= {name: rule for name, rule in of_model.items() if wildcard(name) in names}
    return {**rules, **BESIDE.get(model.config.model_type, {})}


def vocabulary(model: Any) -> tuple[Any, Any]:
    """(embedding of the input tokens, head that computes logits); None for one that is missing."""
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        table = None
    head = model.get_output_embeddings()
    linear = isinstance(head, nn.Module) and is_linear(head)
    return table if isinstance(table, nn.Embedding) else None, head if linear else None


def _vocabulary(model: Any, rules: dict[str, Rule]) -> dict[str, Rule]:
    """``rules``, with the embedding, the head and all modules tied to them cut by the vocabulary."""
    names = {id(module): name for name, module in model.named_modules()}
    for module, style in zip(vocabulary(model), (plan.EMBEDDING_ROW, plan.COLUMN_GATHERED), strict=True):
        if module is not None and rule_of(names[id(module)], rules) is None:
            rules[names[id(module)]] = style
    tables = [module for name, module in model.named_modules() if rule_of(name, rules) == plan.EMBEDDING_ROW]
    head = vocabulary(model)[1]  # of a decoder whose table is not the one that the encoder's tokens ask
    tied = {id(p) for module in (*tables, *(() if head is None else (head,))) for p in module.parameters(recurse=False)}
    for name, module in model.named_modules():
        shares = any(id(p) in tied for p in module.parameters(recurse=False))
        if shares and (isinstance(module, nn.Embedding) or is_linear(module)) and rule_of(name, rules) is None:
            rules[name] = plan.EMBEDDING_ROW if isinstance(module, nn.Embedding) else plan.COLUMN_GATHERED
    return rules
