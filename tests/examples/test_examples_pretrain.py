"""The BERT example's training loop: resuming, what it reports, and one real run under torchrun."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.places import ROOT
from transformers import BertForPreTraining

from tpcore import Mesh
from tpcore.testing import run_ranks

sys.path.insert(0, str(ROOT / "examples"))

import bert_pretrain
from bert_data import batches, load_data
from bert_model import bert_config
from bert_report import Report, read_metrics

TINY = {
    "batch_size": 4,
    "max_seq_length": 32,
    "vocab_size": 67,  # odd, so that it is padded at tp=2
    "max_steps": 6,
    "warmup_steps": 2,
    "log_every": 2,
}
CURVE = ("step", "loss", "mlm_loss", "nsp_loss", "grad_norm", "lr")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return sentences(tmp_path_factory.mktemp("text") / "text.txt")


def sentences(path):
    """A few hundred: reading all of the embedded corpus takes longer than training on it."""
    words = ["the", "value", "of", "an", "object", "is", "bound", "to", "its", "name", "when", "it", "runs"]
    generator = torch.Generator().manual_seed(0)

    def sentence():
        chosen = torch.randint(len(words), (8,), generator=generator).tolist()
        return " ".join(words[i] for i in chosen).capitalize() + "."

    paragraphs = (" ".join(sentence() for _ in range(12)) for _ in range(40))
    path.write_text("\n\n".join(paragraphs))
    return path


def arguments(text, output_dir, *flags, **options):
    settings = {"data": text, "output_dir": output_dir, **TINY, **options}
    return [*(f"--{name}={value}" for name, value in settings.items()), *flags]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """The folder of a run at tp=1 without dropout."""
    folder = tmp_path_factory.mktemp("whole")
    train(Mesh({"dp": 1, "tp": 1}), arguments(text, folder, dropout=0))
    return folder


def assert_close(one, other):
    """In float32: sums over ranks round differently, by about 1e-7 of a loss of about 6, and six steps keep that."""
    torch.testing.assert_close(torch.tensor(curve(one)), torch.tensor(curve(other)), rtol=1e-5, atol=1e-6)


def train(mesh, argv):
    run_ranks(mesh, lambda ctx: bert_pretrain.train(bert_pretrain.parse(argv)))


def curve(output_dir):
    return [[record[name] for name in CURVE] for record in read_metrics(output_dir)]


@pytest.mark.parametrize("mesh", [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}], ids=["tp2", "dp2"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(mesh, text, tmp_path):
    options = {"dropout": 0.2, "grad_accum_usteps": 2}
    train(Mesh(mesh), arguments(text, tmp_path / "whole", **options))
    train(Mesh(mesh), arguments(text, tmp_path / "parts", steps_this_run=3, **options))
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")[:3]
    train(Mesh(mesh), arguments(text, tmp_path / "parts", "--resume_ckpt", **options))
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 6


def test_steps_after_the_checkpoint_are_trained_and_reported_again(text, whole, tmp_path):
    mesh = Mesh({"dp": 1, "tp": 1})
    train(mesh, arguments(text, tmp_path, dropout=0, steps_this_run=4))
    with (tmp_path / "metrics.jsonl").open("a") as file:  # as if a step 5 had been interrupted
        file.write('{"step": 5, "loss": 1.0, "mlm_loss": 1.0, "nsp_loss": 0.0, "grad_norm": 1.0, "lr": 1.0}\n')
    train(mesh, arguments(text, tmp_path, "--resume_ckpt", dropout=0))
    assert curve(tmp_path) == curve(whole)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_curve_does_not_depend_on_the_degree(resumed, text, whole, tmp_path):
    if resumed:
        train(Mesh({"dp": 1, "tp": 1}), arguments(text, tmp_path, dropout=0, steps_this_run=3))
    flags = ["--resume_ckpt"] if resumed else []
    train(Mesh({"dp": 1, "tp": 2}), arguments(text, tmp_path, *flags, dropout=0))
    about = [json.loads((folder / "run.json").read_text())["vocabulary"] for folder in (whole, tmp_path)]
    assert about[0] == about[1]
    assert about[0] % 2
    assert_close(whole, tmp_path)


def test_reported_losses_are_means_over_micro_batches_and_data_parallel_ranks(text, tmp_path):
    argv = arguments(text, tmp_path, dropout=0, grad_accum_usteps=2, steps_this_run=1)
    train(Mesh({"dp": 2, "tp": 1}), argv)
    options = bert_pretrain.parse(argv)
    data = load_data(text, vocab_size=67, max_seq_length=32, max_predictions=20, seed=options.seed, cache=tmp_path)
    torch.manual_seed(options.seed)
    model = BertForPreTraining(bert_config("tiny", vocab_size=data.vocab_size, max_seq_length=32, dropout=0.0))
    losses = []
    for rank in range(2):
        stream = batches(data.dataset, batch_size=4, seed=options.seed, dp_size=2, dp_rank=rank)
        for batch in itertools.islice(stream, 2):
            labels, is_random = batch.pop("labels"), batch.pop("next_sentence_label")
            out = model(**batch)
            mlm = F.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
            losses.append(torch.stack([mlm, F.cross_entropy(out.seq_relationship_logits, is_random)]))
    (record,) = read_metrics(tmp_path)
    reported = torch.tensor([record["mlm_loss"], record["nsp_loss"]])
    torch.testing.assert_close(reported, torch.stack(losses).mean(0).detach(), rtol=1e-5, atol=0)
    assert record["loss"] == record["mlm_loss"] + record["nsp_loss"]


class TestErrors:
    mesh = Mesh({"dp": 1, "tp": 1})

    def test_what_cannot_be_resumed(self, text, tmp_path):
        with pytest.raises(ValueError, match="--resume_ckpt: there is no checkpoint in"):
            train(self.mesh, arguments(text, tmp_path, "--resume_ckpt"))
        train(self.mesh, arguments(text, tmp_path, steps_this_run=1))
        with pytest.raises(ValueError, match="holds checkpoint_00000001: give --resume_ckpt"):
            train(self.mesh, arguments(text, tmp_path))
        with pytest.raises(ValueError, match=r"other settings: dropout was 0\.1, is 0\.3; batch_size was 4, is 2"):
            train(self.mesh, arguments(text, tmp_path, "--resume_ckpt", dropout=0.3, batch_size=2))

    def test_a_loss_of_nan_stops_every_rank(self, tmp_path):
        def check(ctx):
            report = Report(tmp_path, done=0, last=1, every=1, sequences=1, tensorboard=False)
            mine = torch.tensor([float("nan") if ctx.rank == 0 else 1.0, 1.0])
            with pytest.raises(FloatingPointError, match="the loss is nan at step 1"):
                report.add(1, mine, torch.tensor(1.0), lr=0.1)
            report.close()

        run_ranks(Mesh({"dp": 2, "tp": 1}), check)

    @pytest.mark.parametrize(
        ("option", "message"),
        [
            ("--batch_size=0", "--batch_size must be 1 or more, not 0"),
            ("--max_steps=20", "--warmup_steps 30 must be below --max_steps 20"),
            ("--model_size=huge", "invalid choice: 'huge'"),
            ("--steps=3", "unrecognized arguments"),
        ],
    )
    def test_options(self, option, message, capsys):
        with pytest.raises(SystemExit):
            bert_pretrain.parse([option])
        assert message in capsys.readouterr().err
