"""The BERT example, unmodified, on replicas: its losses are those of plain torch.

tests/test_examples_pretrain.py compares the script over gloo with one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tpcore_neuron.testing import programs, run_replicas
from transformers import BertForPreTraining

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import bert_pretrain
from bert_data import batches
from bert_model import bert_config
from bert_pairs import IGNORED
from bert_report import read_metrics

STEPS, DP, MICRO = 20, 2, 2
FIRST = 9  # before it is interrupted
OPTIONS = {
    "batch_size": 4,
    "grad_accum_usteps": MICRO,
    "max_seq_length": 32,
    "vocab_size": 67,  # odd, so that it is padded at tp=2
    "max_steps": STEPS,
    "warmup_steps": 4,
    "log_every": 5,
    "dropout": 0,
    "tensor_parallel_degree": 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = ["the", "value", "of", "an", "object", "is", "bound", "to", "its", "name", "when", "it", "runs"]
    generator = torch.Generator().manual_seed(0)

    def sentence():
        chosen = torch.randint(len(words), (8,), generator=generator).tolist()
        return " ".join(words[i] for i in chosen).capitalize() + "."

    paragraphs = (" ".join(sentence() for _ in range(12)) for _ in range(40))
    path.write_text("\n\n".join(paragraphs))
    return path


def arguments(text, output_dir, *flags, **options):
    settings = {"data": text, "output_dir": output_dir, **OPTIONS, **options}
    return [*(f"--{name}={value}" for name, value in settings.items()), *flags]


def script(argv: list[str]) -> list[tuple[str, str, bool]]:
    bert_pretrain.main(argv)
    return [(p.what, p.site, p.compiled) for p in programs()]


def unsharded(text, output_dir) -> list[float]:
    """The same training in plain torch: the micro-batches of all data-parallel ranks, one by one."""
    options = bert_pretrain.parse(arguments(text, output_dir))
    output_dir.mkdir()
    data = bert_pretrain._data(options)
    config = bert_config("tiny", vocab_size=data.vocab_size, max_seq_length=32, dropout=0)
    torch.manual_seed(options.seed)
    model = BertForPreTraining(config)
    optimizer = bert_pretrain._optimizer(model, options.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: bert_pretrain._share_of_lr(done, options))
    streams = [batches(data.dataset, batch_size=4, seed=options.seed, dp_size=DP, dp_rank=rank) for rank in range(DP)]
    losses = []
    for _ in range(STEPS):
        total = 0.0
        for stream in streams * MICRO:
            batch = next(stream)
            labels, following = batch.pop("labels"), batch.pop("next_sentence_label")
            out = model(**batch)
            loss = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            loss = loss + F.cross_entropy(out.seq_relationship_logits, following)
            (loss / (DP * MICRO)).backward()
            total += loss.item() / (DP * MICRO)
        torch.nn.utils.clip_grad_norm_(model.parameters(), bert_pretrain.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses


def losses_in(output_dir) -> list[float]:
    return [record["loss"] for record in read_metrics(output_dir)]


def test_the_script_trains_as_plain_torch(text, tmp_path):
    first = run_replicas(script, 4, arguments(text, tmp_path / "xla", steps_this_run=FIRST))
    resumed = run_replicas(script, 4, arguments(text, tmp_path / "xla", "--resume_ckpt"))
    found = losses_in(tmp_path / "xla")
    assert len(found) == STEPS
    # float32 summed in another order, through 20 steps of AdamW
    torch.testing.assert_close(found, unsharded(text, tmp_path / "plain"), rtol=2e-4, atol=0)
    assert found[-1] < 0.8 * found[0]
    steps = [made for what, site, made in first[0] if what == "sync" and "in train" in site]
    assert steps == [True, True] + [False] * (FIRST - 2)
    steps = [made for what, site, made in resumed[0] if what == "sync" and "in train" in site]
    assert len(steps) == STEPS - FIRST
    # after a resume the state is there from the first step on; the first may differ from the others
    assert not any(steps[1:])
