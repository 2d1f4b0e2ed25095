"""Pipelines on replicas: one program for all stages, and as many programs whatever the microbatches."""

from __future__ import annotations

import torch
from helpers.pipelines import batch_of, cut
from onreplicas import on_replicas

import tpcore
from tpcore_neuron.testing import programs


def counted(ctx: tpcore.ParallelContext) -> list[list[tuple[int, int, int]]]:
    """By number of microbatches and step: programs run, programs compiled, operations of the largest."""
    found = []
    for count in (4, 8, 16):
        model = cut(2, ctx)
        pipe = tpcore.PipelineModel(model, count)
        tpcore.layers.move_model_to_device(model, ctx.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for step in range(3):
            batch = {k: v.to(ctx.device) for k, v in batch_of(2 * count, step).items()}
            before = len(programs())
            pipe.run_train(**batch)
            tpcore.optimizer_step(optimizer, max_norm=1.0)
            optimizer.zero_grad(set_to_none=False)
            made = programs()[before:]
            steps.append((len(made), sum(p.compiled for p in made), max(p.operations for p in made)))
        found.append(steps)
    return found


def test_microbatches_run_the_same_programs() -> None:
    """What is compiled for 4 microbatches serves 8 and 16, but for the program that cuts the batch. Nothing
    is compiled after the second step. Replicas compare the programs of both stages as they run."""
    for four, eight, sixteen in on_replicas(2, 1, counted, pp=2):
        for count, steps in ((4, four), (8, eight), (16, sixteen)):
            # one for the batch, one a tick, the step
            assert [run for run, _, _ in steps] == [1 + count + 2 + 1] * 3
            assert [compiled for _, compiled, _ in steps][2:] == [0]
        assert sum(compiled for _, compiled, _ in four) <= 10
        for steps in (eight, sixteen):
            assert [compiled for _, compiled, _ in steps][:2] == [1, 1]
        assert len({most for steps in (four, eight, sixteen) for _, _, most in steps}) == 1
