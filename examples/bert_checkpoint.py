"""A training run's checkpoints: everything that the steps after it follow from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import BertForPreTraining

from tpcore_nxd import parallel_layers

PREFIX = "checkpoint_"


@dataclass(frozen=True)
class State:
    """What is saved, and restored in place. ``curve``: the settings that a continued run must share."""

    model: BertForPreTraining
    optimizer: Optimizer
    scheduler: LRScheduler
    curve: dict[str, Any]


def save(output_dir: Path, state: State, step: int) -> None:
    """Write the state after ``step``, in a folder that appears complete or not at all. Collective.

    Neither random state nor data order is in it: both follow from the seed and the number of the step.
    """
    parallel_layers.save(
        {
            "model": state.model.state_dict(),
            "optimizer": state.optimizer.state_dict(),
            "scheduler": state.scheduler.state_dict(),
            "curve": state.curve,
            "step": step,
        },
        output_dir / f"{PREFIX}{step:08d}",
    )


def start(output_dir: Path, state: State, *, resume: bool) -> int:
    """Restore the newest checkpoint if ``resume``; returns the number of steps that are done. Collective.

    Raises ValueError where there is none to resume, where there is one to overwrite, and where its run
    had other settings.
    """
    folders = sorted(output_dir.glob(f"{PREFIX}*"))
    if not resume:
        if folders:
            raise ValueError(
                f"{output_dir} holds {folders[-1].name}: give --resume_ckpt to go on from it, or another --output_dir"
            )
        return 0
    if not folders:
        raise ValueError(f"--resume_ckpt: there is no checkpoint in {output_dir}")
    rest = parallel_layers.load(folders[-1], model=state.model, model_key="model")
    differences = [
        f"{name} was {rest['curve'].get(name)!r}, is {value!r}"
        for name, value in state.curve.items()
        if rest["curve"].get(name) != value
    ]
    if differences:
        raise ValueError(f"{folders[-1]} is of a run with other settings: {'; '.join(differences)}")
    state.optimizer.load_state_dict(rest["optimizer"])
    state.scheduler.load_state_dict(rest["scheduler"])
    return int(rest["step"])
