"""The BERT example, unmodified, on replicas: its losses are those of the same script on threads.

tests/examples/test_examples_pretrain.py compares those with one rank's and with plain torch.
"""

from __future__ import annotations

import torch
from test_examples_pretrain import arguments, bert_pretrain, read_metrics, sentences, train

from tpcore import Mesh
from tpcore_neuron.testing import programs, run_replicas

STEPS = 20
FIRST = 9  # before it is interrupted
OPTIONS = {"grad_accum_usteps": 2, "max_steps": STEPS, "warmup_steps": 4, "log_every": 5, "dropout": 0}


def script(argv: list[str]) -> list[tuple[str, str, bool]]:
    bert_pretrain.main(argv)
    return [(p.what, p.site, p.compiled) for p in programs()]


def losses_in(output_dir) -> list[float]:
    return [record["loss"] for record in read_metrics(output_dir)]


def test_the_script_trains_as_on_threads(tmp_path):
    text = sentences(tmp_path / "text.txt")
    options = {**OPTIONS, "tensor_parallel_degree": 2}
    first = run_replicas(script, 4, arguments(text, tmp_path / "xla", steps_this_run=FIRST, **options))
    resumed = run_replicas(script, 4, arguments(text, tmp_path / "xla", "--resume_ckpt", **options))
    train(Mesh({"dp": 2, "tp": 1}), arguments(text, tmp_path / "threads", **OPTIONS))
    found = losses_in(tmp_path / "xla")
    assert len(found) == STEPS
    # float32 summed in another order, through 20 steps of AdamW
    torch.testing.assert_close(found, losses_in(tmp_path / "threads"), rtol=2e-4, atol=0)
    assert found[-1] < 0.8 * found[0]
    steps = [made for what, site, made in first[0] if what == "sync" and "in train" in site]
    assert steps == [True, True] + [False] * (FIRST - 2)
    steps = [made for what, site, made in resumed[0] if what == "sync" and "in train" in site]
    assert len(steps) == STEPS - FIRST
    # after a resume the state is there from the first step on; the first may differ from the others
    assert not any(steps[1:])
