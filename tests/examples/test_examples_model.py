"""The BERT example's model surgery: the cut model is the unsharded one, in values, loss and gradients."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.places import ROOT
from helpers.worlds import each_rank
from transformers import BertConfig, BertForPreTraining

from tpcore import Mesh
from tpcore.layers import shard_specs
from tpcore.layers.sharding import sharding
from tpcore.testing import run_ranks

sys.path.insert(0, str(ROOT / "examples"))

from bert_model import build_bert, pretraining_losses

SEED = 5


def config(vocab_size=100, heads=4, dropout=0.0, **overrides):
    settings = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, **overrides}
    return BertConfig(
        vocab_size=vocab_size,
        num_attention_heads=heads,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,  # large, so that every gradient is well above rounding
        **settings,
    )


def unsharded(cfg):
    torch.manual_seed(SEED)
    return BertForPreTraining(cfg)


def batch(vocab_size, rows=3, length=16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocab_size, (rows, length), generator=generator)
    attention = torch.ones_like(ids)
    attention[0, 11:] = 0
    ids[0, 11:] = 0
    ids[1, 3] = 0  # a [PAD] that is attended to: its embedding gets no gradient from here all the same
    labels = torch.full_like(ids, -100)
    labels[:, 2:5] = torch.randint(5, vocab_size, (rows, 3), generator=generator)
    labels[2, 7] = vocab_size - 1  # the last token of the last rank, beside the padding
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "token_type_ids": (torch.arange(length) > 6).long().expand(rows, -1),
        "labels": labels,
        "next_sentence_label": torch.arange(rows) % 2,
    }


def by_name(model):
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab_size", [100, 97])  # 97 is padded at tp 2 and 4
def test_losses_and_all_gradients_are_those_of_the_unsharded_model(tp, vocab_size):
    cfg, data = config(vocab_size), batch(vocab_size)
    reference = unsharded(cfg).double()
    out = reference(**{k: v for k, v in data.items() if "label" not in k})
    mlm = F.cross_entropy(out.prediction_logits.flatten(0, 1), data["labels"].flatten())
    nsp = F.cross_entropy(out.seq_relationship_logits, data["next_sentence_label"])
    (mlm + nsp).backward()
    expected, before = by_name(reference), torch.random.get_rng_state()

    def check(ctx):
        model = build_bert(cfg, SEED).double()
        losses = pretraining_losses(model, data)
        torch.testing.assert_close(losses.mlm, mlm, rtol=1e-12, atol=0)
        torch.testing.assert_close(losses.nsp, nsp, rtol=1e-12, atol=0)
        sum(losses).backward()
        specs = shard_specs(model)
        assert by_name(model).keys() == expected.keys() == specs.keys()
        for name, parameter in by_name(model).items():
            spec = specs[name]
            assert torch.equal(parameter, spec.shard(expected[name].detach(), ctx.coord("tp"), tp)), name
            gradient = spec.shard(expected[name].grad, ctx.coord("tp"), tp)
            # Sums over ranks are in another order than over one matrix: a few ulp of float64.
            assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-13), name

    run_ranks(Mesh({"dp": 1, "tp": tp}), check)
    assert torch.equal(before, torch.random.get_rng_state())


@each_rank(dp=1, tp=2)
def test_what_is_cut_and_what_is_tied(ctx):
    model = build_bert(config(), SEED)
    cut = {name for name, spec in shard_specs(model).items() if spec.dim is not None}
    projections = {f"attention.self.{p}.{w}" for p in ("query", "key", "value") for w in ("weight", "bias")}
    dense = {f"{name}.weight" for name in ("attention.output.dense", "intermediate.dense", "output.dense")}
    inside = projections | dense | {"intermediate.dense.bias"}
    layers = {f"bert.encoder.layer.{i}.{name}" for i in range(2) for name in inside}
    heads = {
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "cls.predictions.bias",
    }
    assert cut == layers | heads
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
    for module in (model, copy.deepcopy(model)):
        state = module.state_dict()
        marked = {name for name, t in state.items() if (found := sharding(t)) and found.layout.cuts}
        # a plain module's entry has no mark: a checkpoint knows it by the memory it shares
        assert marked == cut - {"cls.predictions.bias"}
        assert state.keys() == unsharded(config()).state_dict().keys()


def test_training_mode_drops_alike_where_replicated_and_differently_where_cut():
    # Attention output is summed over the ranks, so that all that follows is equal on both ranks only if
    # every replicated dropout is; the probabilities themselves belong to different heads.
    cfg, data = config(dropout=0.4), batch(100)

    def check(ctx):
        model = build_bert(cfg, SEED).train()
        torch.manual_seed(7)
        probabilities = []
        attention = model.bert.encoder.layer[0].attention.self
        with torch.no_grad():
            for projection in (attention.query, attention.key, attention.value):
                projection.weight.zero_()  # the same heads on both ranks: what differs is the dropout
                projection.bias.fill_(1.0)
        attention.register_forward_hook(lambda module, args, output: probabilities.append(output[0].detach().clone()))
        losses = torch.stack(pretraining_losses(model, data)).detach()
        return losses, probabilities[0]

    (losses, heads), (other_losses, other_heads) = run_ranks(Mesh({"dp": 1, "tp": 2}), check)
    assert torch.equal(losses, other_losses)
    assert not torch.equal(heads, other_heads)


@each_rank(dp=1, tp=4)
def test_heads_that_tp_does_not_divide(ctx):
    with pytest.raises(ValueError, match="tp=4 does not divide num_attention_heads=2"):
        build_bert(config(heads=2), SEED)
    with pytest.raises(ValueError, match="tp=4 does not divide intermediate_size=66"):
        build_bert(config(intermediate_size=66), SEED)
