"""Names of transformers that are private, or have moved before: the first to fail when one is renamed."""

from __future__ import annotations

import importlib
import inspect

import hf
import pytest


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [
        ("transformers.conversion_mapping", "get_model_conversion_mapping", ["model"]),
        ("transformers.core_model_loading", "WeightConverter", []),
        ("transformers.core_model_loading", "WeightRenaming", []),
        (
            "transformers.core_model_loading",
            "rename_source_key",
            ["source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict"],
        ),
        ("transformers.core_model_loading", "revert_weight_conversion", ["model", "state_dict"]),
    ],
)
def test_functions(module: str, name: str, parameters: list[str]) -> None:
    found = getattr(importlib.import_module(module), name)
    assert list(inspect.signature(found).parameters)[: len(parameters)] == parameters


def test_attributes_of_a_model() -> None:
    model = hf.llama(tie_word_embeddings=True)
    assert model.tp_plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert model.all_tied_weights_keys == {"lm_head.weight": "model.embed_tokens.weight"}
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    assert model.base_model_prefix == "model"
    assert "_from_config" in dir(model)
    for name in ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_unexpected", "config_class"):
        assert hasattr(model, name), name
    model.loss_function = len
    assert model.loss_function is len
