"""lm-eval's figures of a sharded model, asked itself or over HTTP, are the whole model's, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import hf
from helpers import programs as forked
from helpers.places import ROOT
from tokenizers import Tokenizer, models, pre_tokenizers

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{answer}}}}"
"""
GREEDY = "generation_kwargs: {until: [w9], max_gen_toks: 6, do_sample: false}"
SAMPLED = "generation_kwargs: {until: [w9], max_gen_toks: 6, do_sample: true, temperature: 1.5}"
KINDS = {
    "choices": "output_type: multiple_choice\ndoc_to_choice: [w1, w2, w3]\nmetric_list: [{metric: acc}]",
    "perplexity": "output_type: loglikelihood\nmetric_list: [{metric: perplexity}, {metric: acc}]",
    "rolling": "output_type: loglikelihood_rolling\nmetric_list: [{metric: word_perplexity}]",
    "answers": f"output_type: generate_until\n{GREEDY}\nmetric_list: [{{metric: exact_match}}]",
    "sampled": f"output_type: generate_until\nnum_fewshot: 2\n{SAMPLED}\nmetric_list: [{{metric: exact_match}}]",
}  # fmt: skip
SAID = """
import json
if ctx.rank == 0:
    said = {task: [s["resps"] for s in samples] for task, samples in results["samples"].items()}
    print(json.dumps([list(model.model.layers[0].self_attn.q_proj.weight.shape), said]))
"""
WHOLE = {"tpcore.lazy()": "torch.device('cpu')", "tpcore.parallelize(model.eval())": "model.eval()"}


def _write_inputs(place: Path) -> None:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {"unk_token": "w0", "eos_token": "w9", "pad_token": "w0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **named).save_pretrained(place / "model")
    hf.double(hf.llama).save_pretrained(place / "model")
    (place / "tasks").mkdir()
    rows = [{"question": f"w{i} w{i * 7 % 90} w{i + 3}", "answer": f"w{i % 3 + 1}"} for i in range(24)]
    (place / "data.json").write_text("\n".join(map(json.dumps, rows)))
    for name, rest in KINDS.items():
        (place / "tasks" / f"{name}.yaml").write_text(TASK.format(name=name, data=place / "data.json") + rest)


def _figures(place: Path, program: str) -> tuple[list[str], list[int], Any]:
    """(The printed table, shape of a weight on rank 0, what the model said to each request.)"""
    (place / "evaluate.py").write_text(program + SAID)
    words = ["torchrun", "--standalone", "--nproc-per-node=2", "evaluate.py", "model", "tasks", *KINDS]
    environment = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(place / "cache"), "HF_DATASETS_OFFLINE": "1"}
    done = forked.run(words, place, {**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    shape, said = json.loads(next(line for line in lines if line.startswith("[[")))  # rank 1 prints too
    return [line for line in lines if line.startswith("|")], shape, said


def _leaves(said: Any) -> Iterator[Any]:
    for value in said.values() if isinstance(said, dict) else said:
        yield from _leaves(value) if isinstance(value, (dict, list)) else [value]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm_eval, 60 packages, is not among the pinned ones"
    ),
]


def test_the_figures_are_the_whole_models(tmp_path: Path) -> None:
    _write_inputs(tmp_path)
    page = (ROOT / "docs" / "evaluate.md").read_text()
    program = page.partition('title="evaluate.py"\n')[2].partition("```")[0]
    table, (rows, _), said = _figures(tmp_path, program)
    for line, instead in WHOLE.items():
        assert line in program
        program = program.replace(line, instead)
    whole_table, (whole_rows, _), whole_said = _figures(tmp_path, "import torch\n" + program)
    assert whole_rows == 2 * rows
    assert len(table) == 2 + len(KINDS) + 1, "a head, a rule, and perplexity's second metric"
    assert table == whole_table
    assert said.keys() == whole_said.keys() == set(KINDS)
    # sums of two ranks round otherwise; texts and flags are compared as they are
    assert list(_leaves(said)) == [pytest.approx(v, abs=1e-9) for v in _leaves(whole_said)]


@pytest.mark.skipif(importlib.util.find_spec("tenacity") is None, reason="lm_eval's client is of lm_eval[api]")
def test_the_figures_over_http_are_the_whole_models(tmp_path: Path) -> None:
    """Prompts of several kinds and lengths, in lists, with what the harness asks of a completion and no more."""
    _write_inputs(tmp_path)
    kinds = ["choices", "perplexity", "rolling", "answers"]  # what is sampled has other numbers
    environment = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1"}
    page = (ROOT / "docs" / "evaluate.md").read_text()
    (url,) = re.findall(r"^URL=(.*)", page, re.M)
    lines = re.findall(r"^(?:tpcore serve|lm_eval) .*", page.replace("\\\n", "").replace("$URL", url), re.M)
    serve, evaluate = map(shlex.split, lines)
    options = {"stdout": subprocess.PIPE, "cwd": tmp_path, "text": True, "env": {**os.environ, **environment}}
    words = [sys.executable, "-m", "tpcore", *serve[1:], "--port", "0"]
    with subprocess.Popen([w.replace("FOLDER", "model") for w in words], **options) as server:  # type: ignore[call-overload]
        try:
            address = server.stdout.readline().split()[4].rstrip(",")
            names = {"YAML_FOLDER": "tasks", "my_task": ",".join(kinds), "FOLDER": "model"}
            names["http://127.0.0.1:8000"] = address
            told = _table(evaluate, names, tmp_path, environment)
        finally:
            server.terminate()
    names |= {"local-completions": "hf", evaluate[evaluate.index("--model_args") + 1]: "pretrained=model,dtype=float64"}
    assert told == _table([names.get(word, word) for word in evaluate], names, tmp_path, environment)
    assert len(told) == 2 + len(kinds) + 1


def _table(words: list[str], names: dict[str, str], place: Path, environment: dict[str, str]) -> list[str]:
    for name, instead in names.items():
        words = [word.replace(name, instead) for word in words]
    done = forked.run(["python", "-m", *words], place, {**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("|")]
