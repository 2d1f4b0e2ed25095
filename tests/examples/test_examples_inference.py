"""The inference examples: cut, traced and loaded, the models give what the unsharded ones give."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import programs as forked
from helpers.places import ROOT
from tokenizers import Tokenizer
from transformers import BertForPreTraining

from tpcore import Mesh
from tpcore.settings import CHECK
from tpcore.testing import run_ranks
from tpcore_nxd import parallel_layers

sys.path.insert(0, str(ROOT / "examples"))

import bert_fill
import bert_inference
from bert_model import bert_config, build_bert
from bert_tokens import cached_tokenizer

EXAMPLES = Path(bert_fill.__file__).parent


def run(script: str, *options: object, cwd: Path) -> str:
    words = ["python", str(EXAMPLES / script), *map(str, options)]
    env = {"OMP_NUM_THREADS": "1", "COLUMNS": "100", CHECK.name: CHECK.default}
    done = forked.run(words, cwd, os.environ | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder():
    return bert_inference.packaged_model()


@pytest.fixture(scope="module")
def expected(folder):
    with torch.no_grad():
        return bert_inference.whole_model(folder)(**bert_inference.encode(folder, bert_inference.SENTENCES))


class TestSentences:
    def test_the_model_knows_what_belongs_together(self, expected):
        similar = expected @ expected.T - 2 * torch.eye(len(expected))
        assert similar.argmax(1)[:4].tolist() == [1, 0, 3, 2]

    @pytest.mark.parametrize("tp", [1, 2, 4])  # 4: a padded vocabulary
    def test_cut_is_whole(self, folder, expected, tp):
        inputs = bert_inference.encode(folder, bert_inference.SENTENCES)

        def embed(ctx):
            with torch.no_grad():
                return bert_inference.parallel_model(folder)(**inputs)

        for got in run_ranks(Mesh({"dp": 1, "tp": tp}), embed):
            # components are about 0.05; float32 sums round in another order
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.processes
    def test_program(self, tmp_path, capsys):
        bert_inference.main(["--output_dir", str(tmp_path / "traced")])
        printed = capsys.readouterr().out
        assert "largest difference of embeddings and similarities" in printed
        assert printed.count("0.560") == 2  # of the two sentences on share prices, by both models
        assert (tmp_path / "traced/tp_rank_1/model.safetensors").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What bert_pretrain.py leaves behind, without the training."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = cached_tokenizer(bert_fill.load_corpus(), 301, folder)  # odd, so padded at tp 2
    size = tokenizer.get_vocab_size()
    config = bert_config("tiny", vocab_size=size, max_seq_length=32, dropout=0.0)
    about = {"vocabulary": size, "options": {"model_size": "tiny", "max_seq_length": "32"}}
    (folder / "run.json").write_text(json.dumps(about))

    def save(ctx):
        state = {"model": build_bert(config, 3).state_dict(), "step": 7}
        parallel_layers.save(state, folder / "checkpoint_00000007")

    run_ranks(Mesh({"dp": 1, "tp": 2}), save)
    return folder


class TestFilling:
    @pytest.mark.parametrize("tp", [1, 2])
    def test_the_consolidated_checkpoint_is_the_same_model_whole_and_cut(self, trained, tmp_path, tp):
        whole = bert_fill.whole_checkpoint(trained, tmp_path / "whole")
        unsharded = BertForPreTraining.from_pretrained(whole).eval()
        tokenizer = Tokenizer.from_file(str(next(trained.glob("wordpiece-*.json"))))
        inputs = bert_fill.batch(bert_fill.puzzles(tokenizer, 3, 32))
        with torch.no_grad():
            expected = unsharded(**inputs).prediction_logits

        def logits(ctx):
            with torch.no_grad():
                return bert_fill.parallel_model(whole)(**inputs).prediction_logits

        for got in run_ranks(Mesh({"dp": 1, "tp": tp}), logits):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)  # logits of about 1 in float32

    def test_no_checkpoint(self, tmp_path):
        with pytest.raises(SystemExit, match="no checkpoint in"):
            bert_fill.newest_checkpoint(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("variables", [{}, {"TPCORE_BACKEND": "neuron", "TPCORE_NEURON_LIMITS": "2.33"}], ids=len)
def test_documented_calls(tmp_path, monkeypatch, variables):
    """On CPUs, and as they are on the stand-in for Neuron's native road."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    printed = run("nxd_inference.py", "--layers", 1, "--hidden_size", 128, cwd=tmp_path)
    assert printed.count("difference") == 2
    assert "same meaning: unsharded" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_tiny_llama_is_trained_served_and_streamed(tmp_path):
    # at tp=2 tests/extensions/hf/test_generate_served.py does the same step by step
    sizes = "--steps 2 --hidden 64 --layers 1 --new_tokens 5 --tensor_parallel_degree 1"
    options = [*sizes.split(), "--output_dir", tmp_path / "out"]
    printed = run("llama_generate.py", *options, cwd=tmp_path)
    assert "step 2: loss" in printed
    assert "The for statement is used to" in printed
    assert "the 5 tokens equal those of transformers' generate in one process" in printed
