"""The costs of a pipeline on one rank: idle ticks, kept activations, bytes sent to the next stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...train.pipeline import PipelinedLayers, Schedule


@dataclass(frozen=True)
class StageCost:
    """One stage of a pipeline. Bytes are those of one step."""

    name: str  # of the PipelinedLayers in the model
    stage: int
    stages: int
    microbatches: int
    layers: tuple[str, ...]  # numbers of the layers that the stage runs
    bubble: float  # the fraction of ticks without a microbatch
    input_bytes: int  # of one microbatch's input; a stage sends as much to the next one at each tick
    kept: int  # bytes of inputs kept for backward, with recomputation
    kept_lockstep: int  # the same for the one-forward-one-backward schedule
    sent: int  # bytes sent: to the next stage in forward, to the previous one in backward


@contextmanager
def pipeline_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The inputs of the model's pipelines, by name, noted while the model runs in the block."""
    inputs: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[name] = args[0] if args else next(iter(kwargs.values()))

    handles = [m.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, m in _pipelines(model)]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def stage_costs(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[StageCost, ...]:
    return tuple(_cost(name, m, inputs[name]) for name, m in _pipelines(model) if name in inputs)


def _pipelines(model: nn.Module) -> list[tuple[str, PipelinedLayers]]:
    return [(name, m) for name, m in model.named_modules() if isinstance(m, PipelinedLayers)]


def _cost(name: str, layers: PipelinedLayers, x: Tensor) -> StageCost:
    schedule = Schedule(layers.pp.size, layers.num_microbatches)
    one = x.numel() * x.element_size() // schedule.microbatches
    return StageCost(
        name=name,
        stage=layers.stage.place,
        stages=schedule.stages,
        microbatches=schedule.microbatches,
        layers=tuple(number for number, _ in layers.named_children()),
        bubble=schedule.bubble,
        input_bytes=one,
        kept=schedule.ticks * one,
        kept_lockstep=schedule.inputs_held * one,
        sent=2 * (schedule.ticks - 1) * one if schedule.stages > 1 else 0,
    )
