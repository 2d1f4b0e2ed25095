"""Multimodal models, and language models with other heads: a tiny one of each class, and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from helpers.families import DROPOUTS, Verdict, Whole, _named

IMAGE = 98  # the token in whose places the vision tower's outputs stand
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**WIDTHS, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "max_position_embeddings": 64}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**WIDTHS, "image_size": 32, "patch_size": 8}
SEQ2SEQ = {"d_model": 32, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3}
SEQ2SEQ |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
for side in ("encoder", "decoder"):
    SEQ2SEQ |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
SEQ2SEQ |= _named("dropout attention_dropout activation_dropout classifier_dropout", 0.0)
BERT = {**WIDTHS, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0, "num_labels": 3}
BERT |= _named("hidden_dropout_prob attention_probs_dropout_prob", 0.0)
LLAMA = {**TEXT, "num_labels": 3}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0, "classifier_dropout": 0.0, "num_labels": 3}


def ids(tokens: int = 8, images: int = 0) -> Tensor:
    found = torch.randint(3, 97, (3, tokens), generator=torch.Generator().manual_seed(1))
    found[:, 1 : 1 + images] = IMAGE
    found[:, -1] = 2
    return found


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def words() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": torch.ones(3, 8, dtype=torch.long)}


def causal(images: int) -> dict[str, Tensor]:
    tokens = ids(images + 6, images)
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == IMAGE, -100)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": noise(3, 3, 32, 32)}


def patches() -> dict[str, Tensor]:
    """Three images of 4 x 4 patches, of which Qwen's towers merge 2 x 2."""
    tokens = causal(4)
    kinds = (tokens["input_ids"] == IMAGE).long()
    grid = torch.tensor([[1, 4, 4]] * 3)
    return {"pixel_values": noise(48, 384), "image_grid_thw": grid, "mm_token_type_ids": kinds, **tokens}


def labels(*shape: int) -> dict[str, Tensor]:
    return {"labels": torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2))}


def span() -> dict[str, Tensor]:
    return {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([4, 3, 6])}


def qwen(kind: Any, **vision: Any) -> Any:
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    tower = {"depth": 2, "num_heads": 4, "patch_size": 8, **vision}
    return kind(text_config={**TEXT, "rope_parameters": sections}, vision_config=tower, image_token_id=IMAGE)


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )


def two_towers(kind: Any) -> Any:
    text = {name: TEXT[name] for name in (*WIDTHS, "vocab_size", "max_position_embeddings")}
    return kind(text_config={**text, "eos_token_id": 2, "projection_size": 32}, vision_config=VISION)


t = transformers
CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Tensor]]]] = {
    "CLIPModel": (lambda: two_towers(t.CLIPConfig), lambda: {"input_ids": ids(), **pixels()}),
    "SiglipModel": (lambda: two_towers(t.SiglipConfig), lambda: {"input_ids": ids(), **pixels()}),
    "LlavaForConditionalGeneration": (llava, lambda: {**causal(16), **pixels()}),
    "Gemma3ForConditionalGeneration": (
        lambda: t.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE),
        lambda: {**causal(4), **pixels(), "token_type_ids": (ids(10, 4) == IMAGE).long()},
    ),
    "Qwen2VLForConditionalGeneration": (
        lambda: qwen(t.Qwen2VLConfig, embed_dim=32, hidden_size=32, mlp_ratio=2),
        patches,
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        lambda: qwen(t.Qwen2_5_VLConfig, hidden_size=32, out_hidden_size=32, intermediate_size=64),
        patches,
    ),
    "BartForConditionalGeneration": (lambda: t.BartConfig(**SEQ2SEQ), lambda: {**words(), "labels": ids()}),
    "MarianMTModel": (lambda: t.MarianConfig(**SEQ2SEQ), lambda: {**words(), "labels": ids()}),
    "T5ForConditionalGeneration": (lambda: t.T5Config(**T5), lambda: {**words(), "labels": ids()}),
    "WhisperForConditionalGeneration": (
        lambda: t.WhisperConfig(
            **{**SEQ2SEQ, "max_source_positions": 12, "num_mel_bins": 8, "max_target_positions": 64}
        ),
        lambda: {"input_features": noise(3, 8, 24), "labels": ids()},
    ),
    "BertForSequenceClassification": (lambda: t.BertConfig(**BERT), lambda: {**words(), **labels(3)}),
    "LlamaForSequenceClassification": (lambda: t.LlamaConfig(**LLAMA), lambda: {**words(), **labels(3)}),
    "BartForSequenceClassification": (lambda: t.BartConfig(**SEQ2SEQ), lambda: {**words(), **labels(3)}),
    "T5ForSequenceClassification": (lambda: t.T5Config(**T5, eos_token_id=2), lambda: {**words(), **labels(3)}),
    "BertForTokenClassification": (lambda: t.BertConfig(**BERT), lambda: {**words(), **labels(3, 8)}),
    "LlamaForTokenClassification": (lambda: t.LlamaConfig(**LLAMA), lambda: {**words(), **labels(3, 8)}),
    "BertForQuestionAnswering": (lambda: t.BertConfig(**{**BERT, "num_labels": 2}), lambda: {**words(), **span()}),
    "LlamaForQuestionAnswering": (lambda: t.LlamaConfig(**TEXT), lambda: {**words(), **span()}),
}
"""For each class its configuration and a batch, of float64 where it is no text."""


def case(name: str) -> tuple[Any, Any, dict[str, Tensor]]:
    """A class, its configuration without dropout, and a batch."""
    configure, batch = CASES[name]
    config = configure()
    for part in (config, *(getattr(config, n) for n in ("text_config", "vision_config") if hasattr(config, n))):
        for option in DROPOUTS.split():
            if isinstance(getattr(part, option, None), float):
                setattr(part, option, 0.0)
    return getattr(transformers, name), config, batch()


def composed(name: str, degree: int = 2) -> Verdict:
    """What comes of a class. Raises if it differs: none of these is refused."""
    kind, config, batch = case(name)
    outcome = Whole.of(kind, config, batch).compared(degree)
    assert not isinstance(outcome, str), outcome
    found, share = outcome
    if not found < 1e-5:  # as in families.verdict
        raise AssertionError(f"a sharded {name} differs from the whole by {found:.0e}")
    return Verdict(config.model_type, name, True, "works", share)
