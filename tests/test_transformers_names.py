"""Names of transformers that are private, or have moved before: the first to fail when one is renamed."""

from __future__ import annotations

import importlib
import inspect

import hf
import pytest
import torch


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
    for name in ("past_key_values", "position_ids", "attention_mask", "use_cache"):  # of a served model
        assert name in inspect.signature(model.forward).parameters, name
    assert {"_tp_plan", "main_input_name"} <= set(dir(type(model)))
    model.peft_config = None  # what adapters look for


def test_the_cache_that_a_model_makes_has_keys_and_values_by_layer() -> None:
    ids = hf.text()["input_ids"]
    made = hf.llama(num_key_value_heads=1).eval()(input_ids=ids, use_cache=True).past_key_values
    assert [tuple(layer.keys.shape) for layer in made.layers] == [(3, 1, 8, 8)] * 2
    assert [layer.values.shape for layer in made.layers] == [layer.keys.shape for layer in made.layers]


def test_masks_of_four_dimensions_are_taken_as_they_are() -> None:
    """A served model makes its own: each row sees its own positions."""
    from transformers import masking_utils

    found = masking_utils._preprocess_mask_arguments
    assert list(inspect.signature(found).parameters)[:3] == ["config", "inputs_embeds", "attention_mask"]
    model, ids = hf.llama().eval(), hf.text()["input_ids"]
    nothing = torch.full((3, 1, 8, 8), torch.finfo(torch.float32).min)
    alone = nothing.masked_fill(torch.eye(8, dtype=torch.bool), 0.0)
    want = torch.cat([model(ids[:, i : i + 1], position_ids=torch.tensor([[i]])).logits for i in range(8)], 1)
    torch.testing.assert_close(model(ids, attention_mask=alone).logits, want, rtol=1e-4, atol=1e-4)  # float32


def test_names_of_explain_and_of_loading() -> None:
    import transformers

    assert callable(transformers.AttentionInterface.register)
    assert callable(importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward)
    assert isinstance(transformers.PreTrainedModel.__dict__["from_pretrained"], classmethod)
    assert callable(transformers.AutoConfig.for_model)
    assert callable(hf.llama().set_attn_implementation)
    assert transformers.pytorch_utils.Conv1D(4, 4).nf == 4
