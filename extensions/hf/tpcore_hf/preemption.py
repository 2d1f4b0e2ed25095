"""A Trainer's checkpoint when its scheduler ends the job: ``TrainingArguments(enable_jit_checkpoint=True)``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback

from tpcore.train.preemption import Preemption

_OPTION = "enable_jit_checkpoint"


class SaveOnPreemption(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """After the step in which a rank received SIGTERM, all ranks save a checkpoint and leave with status 143.
    ``preemption``: entered around the training."""

    def __init__(self, preemption: Preemption) -> None:
        self.preemption = preemption

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.preemption.requested():
            control.should_save = control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.preemption.number:
            self.preemption.leave()


@contextmanager
def own_preemption(args: Any) -> Iterator[bool]:
    """Inside, ``args`` do not ask for transformers' own checkpoint on SIGTERM, of which each rank would decide alone;
    whether they did."""
    asked = bool(getattr(args, _OPTION, False))
    if asked:
        setattr(args, _OPTION, False)
    try:
        yield asked
    finally:
        if asked:
            setattr(args, _OPTION, True)
