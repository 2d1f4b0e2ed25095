"""transformers' BERT models, cut over the tensor-parallel group."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from bert_pairs import IGNORED, Example
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertForPreTraining, BertPreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import tpcore
from tpcore import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, parallel_cross_entropy

SIZES = {  # layers, hidden size, heads: the published miniature and full BERTs; 4 x hidden in the MLP
    "tiny": (2, 128, 2),
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}
_ATTENTION = "tpcore_sdpa"

Bert = TypeVar("Bert", bound=BertPreTrainedModel)


class Losses(NamedTuple):
    """Means over the predicted tokens and over the pairs of a batch; training minimises their sum."""

    mlm: Tensor
    nsp: Tensor


def bert_config(size: str, *, vocab_size: int, max_seq_length: int, dropout: float) -> BertConfig:
    layers, hidden, heads = SIZES[size]
    return BertConfig(
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=max_seq_length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def build_bert(config: BertConfig, seed: int) -> BertForPreTraining:
    """This rank's part of the model that ``torch.manual_seed(seed); BertForPreTraining(config)`` gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = BertForPreTraining(config)
    return shard_bert(model)


def shard_bert(model: Bert, *, gather_logits: bool = False) -> Bert:
    """Replace, in place, what is sharded by its tpcore counterpart holding this rank's part of the values.

    Of any of transformers' BERT models: the encoder and the word embedding, and the vocabulary head where
    there is one. ``gather_logits``: that head returns the logits of the whole vocabulary on every rank, as
    whoever picks words needs them; the loss of pretraining works on the parts.

    The model comes whole, new or pretrained, so that every rank holds all of it for a moment: 4 bytes a
    parameter, 0.4 GB for BERT base. Each layer's full weights are freed as soon as it is replaced.
    """
    config, tp = model.config, tpcore.current().comm("tp").size
    for name in ("num_attention_heads", "intermediate_size"):
        if getattr(config, name) % tp:
            raise ValueError(f"tp={tp} does not divide {name}={getattr(config, name)}: choose a tp that does")
    bert: Any = model.base_model
    for layer in bert.encoder.layer:
        _shard_layer(layer, tp)
    # pad: where tp does not divide the vocabulary
    table = ParallelEmbedding.from_plain(bert.embeddings.word_embeddings, pad=True)
    bert.embeddings.word_embeddings = table
    if hasattr(model, "cls") and hasattr(model.cls, "predictions"):
        head: Any = model.cls.predictions
        head.decoder = ColumnParallelLinear.from_plain(head.decoder, gather_output=gather_logits, pad=True)
        # One parameter under two names each, as in the unsharded model.
        head.decoder.weight = table.weight
        head.bias = head.decoder.bias
    model.set_attn_implementation(_ATTENTION)
    return model


def pretraining_losses(model: BertForPreTraining, batch: Example) -> Losses:
    """The same on every tensor-parallel rank."""
    out = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], token_type_ids=batch["token_type_ids"]
    )
    # The decoder gives each rank its part of the vocabulary, [batch, sequence, vocabulary / tp].
    labels = batch["labels"]
    tokens = parallel_cross_entropy(
        out.prediction_logits, labels, ignore_index=IGNORED, vocab_size=model.config.vocab_size
    )
    mlm = tokens.sum() / (labels != IGNORED).sum()
    return Losses(mlm, F.cross_entropy(out.seq_relationship_logits, batch["next_sentence_label"]))


def _shard_layer(layer: Any, tp: int) -> None:
    """Heads and the MLP's width are cut on the way in, and summed over the ranks on the way out."""
    attention = layer.attention.self
    column, row = ColumnParallelLinear.from_plain, RowParallelLinear.from_plain
    for name in ("query", "key", "value"):
        setattr(attention, name, column(getattr(attention, name), gather_output=False))
    attention.num_attention_heads //= tp
    attention.all_head_size //= tp
    layer.attention.output.dense = row(layer.attention.output.dense, input_is_parallel=True)
    layer.intermediate.dense = column(layer.intermediate.dense, gather_output=False)
    layer.output.dense = row(layer.output.dense, input_is_parallel=True)


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """torch's attention over this rank's heads, whose dropout must differ from the other ranks' heads'."""
    if not kwargs.get("dropout"):
        return sdpa_attention_forward(module, *args, **kwargs)
    with tpcore.random.sharded():
        return sdpa_attention_forward(module, *args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """torch's mask. transformers leaves it out where a batch has no padding, which it finds by looking: on a
    lazy backend that cuts the graph, and gives ranks with other batches another program."""
    if not tpcore.current().comm("tp").eager:
        kwargs["allow_is_bidirectional_skip"] = False
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, _mask)
