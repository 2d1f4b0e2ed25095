"""The same small training by the stock Trainer in one process and by tpcore's on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import tpcore
import tpcore_hf
from helpers import hf
from tpcore import Mesh

TP, BOTH = Mesh({"pp": 1, "dp": 1, "tp": 2}), Mesh({"pp": 1, "dp": 2, "tp": 2})
STAGES = Mesh({"pp": 2, "dp": 1, "tp": 2})
CONTEXT = Mesh({"pp": 1, "dp": 2, "cp": 2, "tp": 1})
KEPT = ["loss", "grad_norm", "learning_rate", "epoch", "eval_loss", "eval_right", "num_input_tokens_seen", "total_flos"]
ROUNDS = {"rtol": 1e-5, "atol": 1e-6}  # float32, in which the order of sums differs


@cache
def examples(count: int) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    found = []
    for ids in torch.randint(3, 99, (count, 8), generator=made):
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    return found


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return hf.llama(num_hidden_layers=2, **options)


def arguments(where: Path, **options: Any) -> transformers.TrainingArguments:
    common: dict[str, Any] = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 4}
    common |= {"logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "report_to": [], "use_cpu": True}
    common |= {"max_grad_norm": 0.5}  # below every norm here: clipping counts
    common |= {"disable_tqdm": True, "include_num_input_tokens_seen": "all"}
    return transformers.TrainingArguments(output_dir=str(where), **{**common, **options})


def right(found: transformers.EvalPrediction) -> dict[str, float]:
    """How many next tokens are predicted, in thousandths: needs the logits of the whole vocabulary."""
    guesses = found.predictions.argmax(-1)[:, :-1]
    return {"right": float((guesses == found.label_ids[:, 1:]).mean()), "size": len(found.label_ids)}


def data() -> dict[str, Any]:
    return {"train_dataset": examples(22), "eval_dataset": examples(8), "compute_metrics": right}


def history(trainer: transformers.Trainer) -> list[dict[str, float]]:
    return [{k: v for k, v in entry.items() if k in KEPT} for entry in trainer.state.log_history]


def stock(where: Path, make: Callable[[], Any] = model, **options: Any) -> transformers.Trainer:
    trainer = transformers.Trainer(make(), arguments(where, **options), **data())
    trainer.train()
    trainer.evaluate()
    return trainer


def on_mesh(
    ctx: tpcore.ParallelContext,
    where: Path,
    cut: dict[str, Any] | Callable[[], Any],
    zero1: bool | dict[str, Any] = False,
    resume: str | None = None,
    **options: Any,
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """(history, the whole model's weights, none with stages). ``cut``: how, or what makes a model that is sharded."""
    from tpcore_hf.trainer import Trainer

    made = cut() if callable(cut) else tpcore.parallelize(model(), **cut)
    trainer = Trainer(made, arguments(where, **options), **data(), zero1=zero1)
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    return history(trainer), tpcore_hf.full_state_dict(made) if ctx.comm("pp").size == 1 else {}


def assert_same_history(got: list[dict[str, float]], want: list[dict[str, float]], **tolerance: float) -> None:
    assert [entry.keys() for entry in got] == [entry.keys() for entry in want]
    for one, other in zip(got, want, strict=True):
        for name in one:
            torch.testing.assert_close(
                one[name], other[name], **(tolerance or ROUNDS), msg=lambda m, n=name: f"{n}: {m}"
            )


def assert_same_weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, t in got.items():
        # AdamW divides by the root of what it has seen: gradients near 0 move weights by the learning rate
        torch.testing.assert_close(t, want[name], rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")
