"""What a training run says about itself: progress bar, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import tpcore

METRICS = "metrics.jsonl"


def read_metrics(output_dir: Path) -> list[dict[str, float]]:
    """One record for each optimizer step, in order."""
    return [json.loads(line) for line in (output_dir / METRICS).read_text().splitlines()]


class Report:
    """Collects each step's figures on every rank; rank 0 writes them every ``every`` steps.

    Reading a figure waits for the device and takes one exchange over the data-parallel ranks, hence not
    after each step. Steps after ``done`` in an older metrics file belong to no checkpoint and are dropped.
    """

    def __init__(
        self, output_dir: Path, *, done: int, last: int, every: int, sequences: int, tensorboard: bool
    ) -> None:
        self.every, self.sequences = every, sequences  # sequences: in one step, over all ranks
        self.writes = tpcore.current().rank == 0
        self._pending: list[tuple[int, float, Tensor, Tensor]] = []
        self._clock = time.perf_counter()
        self._board: Any = None
        if not self.writes:
            return
        old = read_metrics(output_dir) if (output_dir / METRICS).exists() and done else []
        self._file = (output_dir / METRICS).open("w")
        for record in old[:done]:
            self._write(record)
        # Redrawn on a terminal only: in a log file every redrawing would be a line.
        self._bar = tqdm(total=last, initial=done, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(output_dir / "tensorboard"), purge_step=done + 1)

    def add(self, step: int, losses: Tensor, grad_norm: Tensor, lr: float) -> None:
        """``losses``: MLM and NSP, this rank's means over its micro-batches."""
        # put together when they are read: on a lazy backend that would be part of the next step's program
        self._pending.append((step, lr, losses.detach(), grad_norm.detach()))
        if step % self.every == 0:
            self.flush()

    def flush(self) -> None:
        """Collective over the data-parallel ranks. FloatingPointError on all at a loss of nan."""
        if not self._pending:
            return
        dp = tpcore.current().comm("dp")
        figures = torch.stack([torch.cat([losses, norm.reshape(1)]) for *_, losses, norm in self._pending])
        rows = (dp.all_reduce(figures) / dp.size).tolist()
        seconds = time.perf_counter() - self._clock
        rate = len(rows) * self.sequences / seconds
        records = [
            {
                "step": step,
                "loss": mlm + nsp,
                "mlm_loss": mlm,
                "nsp_loss": nsp,
                "grad_norm": norm,
                "lr": lr,
                "sequences_per_second": rate,
            }
            for (step, lr, *_), (mlm, nsp, norm) in zip(self._pending, rows, strict=True)
        ]
        self._pending.clear()
        if self.writes:
            self._show(records)
        for record in records:
            if not math.isfinite(record["loss"]):
                raise FloatingPointError(f"the loss is {record['loss']} at step {record['step']}: try a lower --lr")
        self._clock = time.perf_counter()

    def close(self) -> None:
        if self.writes:
            self._file.close()
            self._bar.close()
            if self._board is not None:
                self._board.close()

    def _show(self, records: list[dict[str, float]]) -> None:
        for record in records:
            self._write(record)
            if self._board is not None:
                for name, value in record.items():
                    self._board.add_scalar(name, value, record["step"])
        self._file.flush()
        latest = records[-1]
        text = (
            f"loss {latest['loss']:.4f}  grad norm {latest['grad_norm']:.2f}"
            f"  {latest['sequences_per_second']:.1f} sequences/s"
        )
        if self._bar.disable:
            print(f"step {latest['step']:>6}  {text}", file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(len(records))

    def _write(self, record: dict[str, float]) -> None:
        self._file.write(json.dumps(record) + "\n")
