"""Pretrain BERT with tensor and data parallelism: masked language model and next sentence prediction.

Alone:             python examples/bert_pretrain.py
On two processes:  torchrun --nproc_per_node=2 examples/bert_pretrain.py --tensor_parallel_degree 2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import bert_checkpoint
import numpy as np
import torch
from bert_data import PretrainingData, add_data_options, batches, load_data
from bert_model import SIZES, bert_config, build_bert, pretraining_losses
from bert_pairs import Example
from bert_report import Report
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertForPreTraining

import tpcore

MAX_NORM = 1.0
WEIGHT_DECAY = 0.01
# What a run's curve follows from: a run can only be continued with the same.
CURVE = [
    *("model_size", "dropout", "batch_size", "grad_accum_usteps", "max_steps", "warmup_steps", "lr"),
    *("seed", "max_seq_length", "max_predictions"),
]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--tensor_parallel_degree", type=int, default=1, help="ranks that one model is sharded over")
    add("--backend", help="name of a tpcore backend; default: what `tpcore backends` shows as usable")
    add("--model_size", choices=SIZES, default="tiny")
    add("--batch_size", type=int, default=16, help="sequences in a micro-batch, for each data-parallel rank")
    add("--grad_accum_usteps", type=int, default=1, help="micro-batches in an optimizer step")
    add("--max_steps", type=int, default=300, help="optimizer steps that the learning rate is planned for")
    add("--steps_this_run", type=int, default=-1, help="stop after that many; -1: go on to --max_steps")
    add("--warmup_steps", type=int, default=30, help="steps of rising learning rate; it then falls to 0")
    add("--lr", type=float, default=1e-3, help="highest learning rate")
    add("--dropout", type=float, default=0.1)
    add_data_options(parser)
    add("--output_dir", type=Path, default=Path("bert_output"), help="vocabulary, metrics, checkpoints")
    add("--resume_ckpt", action="store_true", help="go on from the newest checkpoint in --output_dir")
    add("--checkpoint_every", type=int, help="steps between checkpoints; default: only where the run ends")
    add("--log_every", type=int, default=10, help="steps between reports")
    add("--tensorboard", action="store_true", help="write TensorBoard files to --output_dir")
    arguments = parser.parse_args(argv)
    if arguments.steps_this_run == -1:
        arguments.steps_this_run = arguments.max_steps
    for name in ("batch_size", "grad_accum_usteps", "max_steps", "steps_this_run", "checkpoint_every", "log_every"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            parser.error(f"--{name} must be 1 or more, not {getattr(arguments, name)}")
    if not 0 <= arguments.warmup_steps < arguments.max_steps:
        parser.error(f"--warmup_steps {arguments.warmup_steps} must be below --max_steps {arguments.max_steps}")
    return arguments


def train(arguments: argparse.Namespace) -> None:
    """Train in the current context, from the start or from a checkpoint, until the run's last step."""
    ctx = tpcore.current()
    dp_size, dp_rank = ctx.comm("dp").size, ctx.coord("dp")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    data = _data(arguments)
    config = bert_config(
        arguments.model_size, vocab_size=data.vocab_size, max_seq_length=data.max_seq_length, dropout=arguments.dropout
    )
    model = build_bert(config, arguments.seed)
    tpcore.layers.move_model_to_device(model, ctx.device)
    model.train()
    optimizer = _optimizer(model, arguments.lr)
    scheduler = LambdaLR(optimizer, lambda done: _share_of_lr(done, arguments))
    curve = {name: getattr(arguments, name) for name in CURVE} | {"data": data.sha256, "dp": dp_size}
    state = bert_checkpoint.State(model, optimizer, scheduler, curve)
    done = bert_checkpoint.start(arguments.output_dir, state, resume=arguments.resume_ckpt)
    last = min(arguments.max_steps, done + arguments.steps_this_run)
    stream = batches(
        data.dataset,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        dp_size=dp_size,
        dp_rank=dp_rank,
        start=done * arguments.grad_accum_usteps,
    )
    if ctx.rank == 0:
        _introduce(arguments, data, model, first=done + 1, last=last)
    report = Report(
        arguments.output_dir,
        done=done,
        last=last,
        every=arguments.log_every,
        sequences=arguments.batch_size * arguments.grad_accum_usteps * dp_size,
        tensorboard=arguments.tensorboard,
    )
    with closing(report):
        for step in range(done + 1, last + 1):
            seed_dropout(arguments.seed, step, dp_rank)
            losses = accumulate(model, stream, arguments.grad_accum_usteps)
            norm = tpcore.optimizer_step(optimizer, max_norm=MAX_NORM)
            optimizer.zero_grad()
            report.add(step, losses, norm, float(scheduler.get_last_lr()[0]))
            scheduler.step()
            if step == last or (arguments.checkpoint_every and step % arguments.checkpoint_every == 0):
                report.flush()
                bert_checkpoint.save(arguments.output_dir, state, step)


def accumulate(model: BertForPreTraining, stream: Iterator[Example], micro_batches: int) -> Tensor:
    """Gradients of the mean loss over ``micro_batches``; returns the mean ``[mlm, nsp]``."""
    device = tpcore.current().device
    total = torch.zeros(2, device=device)
    for _ in range(micro_batches):
        batch = {name: values.to(device) for name, values in next(stream).items()}
        losses = pretraining_losses(model, batch)
        ((losses.mlm + losses.nsp) / micro_batches).backward()
        total += torch.stack(losses).detach() / micro_batches
    return total


def seed_dropout(seed: int, step: int, dp_rank: int) -> None:
    """Make the step's dropout follow from these three alone: the random state that a checkpoint needs is
    the step's number, and data-parallel ranks draw differently. ``tpcore.random`` sees to the tp ranks."""
    tpcore.random.manual_seed(int(np.random.SeedSequence((seed, step, dp_rank)).generate_state(1)[0]))


def _data(arguments: argparse.Namespace) -> PretrainingData:
    return load_data(
        arguments.data,
        vocab_size=arguments.vocab_size,
        max_seq_length=arguments.max_seq_length,
        max_predictions=arguments.max_predictions,
        seed=arguments.seed,
        cache=arguments.output_dir,
    )


def _optimizer(model: BertForPreTraining, lr: float) -> Optimizer:
    """AdamW that spares biases and layer norms the weight decay, as in BERT."""
    spared: list[Any] = []
    decayed: list[Any] = []
    # With the names a checkpoint knows how the optimizer's state is sharded, and another tp can load it.
    named = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)
    for name, parameter in model.named_parameters():
        group = spared if name.endswith(("bias", "LayerNorm.weight")) else decayed
        group.append((name, parameter) if named else parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    return AdamW(groups, lr=lr, weight_decay=WEIGHT_DECAY)


def _share_of_lr(done: int, arguments: argparse.Namespace) -> float:
    """Linear warm-up to 1 at ``warmup_steps``, then a linear fall to 0 after ``max_steps``."""
    warmup, planned = int(arguments.warmup_steps), int(arguments.max_steps)
    rising = (done + 1) / (warmup + 1)
    falling = (planned - done) / (planned - warmup)
    return max(0.0, min(rising, falling))


def _introduce(
    arguments: argparse.Namespace, data: PretrainingData, model: BertForPreTraining, *, first: int, last: int
) -> None:
    """Say what is about to run, on the terminal and in run.json."""
    ctx = tpcore.current()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    about = {
        "data": data.description,
        "sequences": len(data),
        "vocabulary": data.vocab_size,
        "tp": ctx.comm("tp").size,
        "dp": ctx.comm("dp").size,
        "parameters_per_rank": parameters,
        "torch": torch.__version__,
        "threads_per_rank": torch.get_num_threads(),
        "options": {name: str(value) for name, value in vars(arguments).items()},
    }
    (arguments.output_dir / "run.json").write_text(json.dumps(about, indent=2) + "\n")
    print(f"{data.description}; {len(data)} sequences of {data.max_seq_length} tokens")
    print(
        f"BERT {arguments.model_size}, vocabulary {data.vocab_size}, {parameters:,} parameters on this rank;"
        f" tp={about['tp']}, dp={about['dp']}; steps {first} to {last}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    tpcore.init(backend=arguments.backend, tp=arguments.tensor_parallel_degree)
    train(arguments)
    tpcore.shutdown()


if __name__ == "__main__":
    main()
