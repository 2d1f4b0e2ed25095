"""Adapters trained by the Trainer on a mesh: the stock Trainer's losses in one process, and files for any."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_pool import RankPool
from test_peft import config, get_peft_model, peft
from trainers import arguments, assert_same_history, data, history, model

import tpcore
from tpcore.layout.mesh import Mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.xdist_group("pool of test_trainer.py"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
SAVES = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def adapted(how: str) -> Any:
    base = tpcore.parallelize(model()) if how == "after" else model()
    torch.manual_seed(4)
    options = config(init_lora_weights="gaussian", lora_dropout=0.0)
    if how == "after":
        return get_peft_model(base, options)
    found = peft.get_peft_model(base, options)
    return tpcore.parallelize(found) if how == "before" else found


@cache
def stock(where: Path) -> list[dict[str, float]]:
    trainer = transformers.Trainer(adapted(""), arguments(where), **data())
    trainer.train()
    trainer.evaluate()
    return history(trainer)


def _on_mesh(ctx: tpcore.ParallelContext, where: Path, how: str, resume: str | None = None) -> list[dict[str, float]]:
    from tpcore.integrations.transformers import Trainer

    dp = ctx.comm("dp").size
    sizes = {"per_device_train_batch_size": 4 // dp, "per_device_eval_batch_size": 4 // dp}
    trainer = Trainer(adapted(how), arguments(where, **SAVES, **sizes), **data(), zero1=dp > 1)
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    return history(trainer)


@pytest.mark.parametrize("how", ["after", "before"])
def test_the_trainers_losses_and_files(pool: RankPool, how: str, tmp_path: Path) -> None:
    want = stock(tmp_path / "stock")
    for got in pool.run(Mesh({"dp": 1, "tp": 2}), _on_mesh, tmp_path / how, how):
        assert_same_history(got, want)
    last = tmp_path / how / "checkpoint-2"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {f.name for f in last.iterdir()}
    assert not list(last.glob("model*"))  # the base model is not trained, and not written
    opened = peft.PeftModel.from_pretrained(model(), last)
    assert any("lora_" in name for name, _ in opened.named_parameters())
    for got in pool.run(Mesh({"dp": 2, "tp": 1}), _on_mesh, tmp_path / how, how, str(last)):
        assert_same_history(got, want)
