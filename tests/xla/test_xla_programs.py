"""One program for all ranks, with the collectives that the theory asks for and no others."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from block import HIDDEN, VOCAB, Block
from onreplicas import on_replicas

import tpcore
from tpcore.runtime.context import ParallelContext
from tpcore_neuron.testing import Program, lower, programs
from tpcore_nxd.parallel_layers import layers

TP4, DP2 = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
BATCH, LENGTH = 2, 8
TOKENS = BATCH * LENGTH


def grads(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def whole_step(ctx: ParallelContext, sequence_parallel: bool, dtype: torch.dtype) -> Program:
    """Forward, backward, the mean over dp, clipping and AdamW, as one program. Lowered, not compiled."""
    model = Block(sequence_parallel, ctx.comm("tp").size, dtype)
    tpcore.layers.move_model_to_device(model, ctx.device)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(ctx.coord("dp")))
    loss = model(ids.to(ctx.device))
    loss.backward()
    tpcore.reduce_gradients(model)
    norm = tpcore.clip_grad_norm(model, 1.0)
    optimizer.step()
    return lower(loss.detach(), norm, *(p.detach() for p in model.parameters()))


@pytest.mark.parametrize(("sequence_parallel", "dtype"), [(False, torch.float32), (True, torch.bfloat16)], ids=str)
def test_a_whole_step_is_one_program_on_8_ranks(sequence_parallel, dtype):
    programs = on_replicas(8, 4, whole_step, sequence_parallel, dtype)
    assert {p.digest for p in programs} == {programs[0].digest}
    collectives = programs[0].collectives
    assert {c.groups for c in collectives} == {TP4, DP2}
    (dp,) = [c for c in collectives if c.groups == DP2]
    model_bytes = sum(p.numel() for p in local_block(sequence_parallel, dtype).parameters())
    assert (dp.kind, dp.nbytes) == ("all_reduce add", model_bytes * dtype.itemsize)
    # the norm: one number for all parameters that are sharded
    assert collectives[-1].operands == (("f32", (1,)),)


def local_block(sequence_parallel: bool, dtype: torch.dtype) -> torch.nn.Module:
    from tpcore.layout.mesh import Mesh
    from tpcore.testing import run_ranks

    return run_ranks(Mesh({"dp": 1, "tp": 4}), lambda ctx: Block(sequence_parallel, 4, dtype))[0]


# name -> what it builds and runs, forward collectives, backward collectives; sizes in elements of fp32
X = TOKENS * HIDDEN
LAYERS = {
    "column": (lambda on: tpcore.ColumnParallelLinear(HIDDEN, 32, gather_output=False, **on), HIDDEN),
    "column gathered": (lambda on: tpcore.ColumnParallelLinear(HIDDEN, 32, **on), HIDDEN),
    "row": (lambda on: tpcore.RowParallelLinear(4 * HIDDEN, 32, input_is_parallel=True, **on), HIDDEN),
    "row of whole": (lambda on: tpcore.RowParallelLinear(HIDDEN, 32, **on), HIDDEN),
    "row unsummed": (lambda on: layers.RowParallelLinear(HIDDEN, 32, bias=False, reduce_output=False, **on), HIDDEN),
    "column padded": (lambda on: tpcore.ColumnParallelLinear(HIDDEN, 30, pad=True, **on), HIDDEN),
    "layer norm": (lambda on: tpcore.LayerNorm(HIDDEN, **on), HIDDEN),
    "rms norm": (lambda on: tpcore.RMSNorm(HIDDEN, **on), HIDDEN),
    "vocabulary": (lambda on: tpcore.ParallelEmbedding(VOCAB, HIDDEN, **on), 0),  # takes ids
    "columns of a table": (lambda on: tpcore.ParallelEmbedding(VOCAB, HIDDEN, shard_across_embedding=True, **on), 0),
}
AR, AG, RS = "all_reduce add", "all_gather", "reduce_scatter add"
THEORY = {
    ("column", False): ([], [(AR, X)]),
    ("column gathered", False): ([(AG, TOKENS * 8)], [(AR, X)]),
    ("row", False): ([(AR, TOKENS * 32)], []),
    ("row of whole", False): ([(AR, TOKENS * 32)], [(AG, X // 4)]),
    ("row unsummed", False): ([], [(AG, X // 4)]),
    ("column padded", False): ([(AG, TOKENS * 8)], [(AR, X)]),
    ("layer norm", False): ([], []),
    ("rms norm", False): ([], []),
    ("vocabulary", False): ([(AR, X)], []),
    ("columns of a table", False): ([(AG, X // 4)], []),
    # x holds this rank's quarter of the tokens; backward gathers it again rather than keep it
    ("column", True): ([(AG, X)], [(RS, 4 * X), (AG, X)]),
    ("column gathered", True): ([(AG, X), (AG, 4 * TOKENS * 8)], [(RS, 4 * X), (AG, X)]),
    ("row", True): ([(RS, TOKENS * 32)], [(AG, TOKENS * 8)]),
    ("layer norm", True): ([], [(AR, HIDDEN), (AR, HIDDEN)]),
    ("rms norm", True): ([], [(AR, HIDDEN)]),
    ("vocabulary", True): ([(RS, X)], [(AG, X // 4)]),
}


def layer_collectives(ctx: ParallelContext, name: str, sequence_parallel: bool) -> tuple[Program, Program]:
    make, width = LAYERS[name]
    on: dict = {"sequence_parallel": True} if "norm" in name else {"sequence_dim": 1}
    on = on if sequence_parallel else {}
    layer = make(on).to(ctx.device)
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64).to(ctx.device)
    x = torch.rand(BATCH, LENGTH, width).to(ctx.device).requires_grad_() if width else ids
    y = layer(x)
    forward = lower(y.detach())
    (y * y.detach()).sum().backward()
    return forward, lower(*([x.grad] if width else []), *grads(layer))


@pytest.mark.parametrize(("name", "sequence_parallel"), THEORY)
def test_collectives_of_a_layer(name, sequence_parallel):
    forward, both = on_replicas(8, 4, layer_collectives, name, sequence_parallel)[0]
    want_forward, want_backward = THEORY[name, sequence_parallel]
    assert found(forward) == Counter(want_forward)
    assert found(both) == Counter(want_forward + want_backward)


def found(program: Program) -> Counter:
    assert {c.groups for c in program.collectives} <= {TP4}
    assert all(c.operands[0][0] == "f32" for c in program.collectives)
    return Counter((c.kind, c.nbytes // 4) for c in program.collectives)


def loss_collectives(ctx: ParallelContext, smoothing: float) -> Program:
    logits = torch.rand(TOKENS, VOCAB // 4).to(ctx.device).requires_grad_()
    target = torch.zeros(TOKENS, dtype=torch.int64).to(ctx.device)
    loss = tpcore.parallel_cross_entropy(logits, target, smoothing)
    loss.sum().backward()
    return lower(loss.detach(), logits.grad)


@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 2), (0.1, 3)])
def test_cross_entropy_is_one_exchange_of_a_few_numbers_a_token(smoothing, numbers):
    program = on_replicas(8, 4, loss_collectives, smoothing)[0]
    assert found(program) == Counter([(AG, numbers * TOKENS)])


def block_collectives(ctx: ParallelContext, sequence_parallel: bool) -> tuple[Program, Program]:
    block = Block(sequence_parallel, 4)
    tpcore.layers.move_model_to_device(block, ctx.device)
    length = LENGTH // 4 if sequence_parallel else LENGTH
    h = torch.rand(BATCH, length, HIDDEN).to(ctx.device).requires_grad_()
    y = block.body(h)
    forward = lower(y.detach())
    (y * y.detach()).sum().backward()
    return forward, lower(h.grad, *grads(block))


def test_a_transformer_block_sums_twice_each_way_or_gathers_and_scatters_its_tokens():
    forward, both = on_replicas(8, 4, block_collectives, False)[0]
    assert found(forward) == Counter({(AR, X): 2})
    assert found(both) == Counter({(AR, X): 4})
    forward, both = on_replicas(8, 4, block_collectives, True)[0]
    assert found(forward) == Counter({(AG, X // 4): 2, (RS, X): 2})
    # backward: what was gathered is gathered again, its gradient scattered, row layers' gradient gathered;
    # three parameters of norms
    assert found(both) == Counter({(AG, X // 4): 2 + 4, (RS, X): 2 + 2, (AR, HIDDEN): 3})


def training(ctx: ParallelContext) -> list[tuple[bool, str]]:
    """Six steps whose number, learning rate, data and logging differ."""
    model = Block(True, ctx.comm("tp").size)
    tpcore.layers.move_model_to_device(model, ctx.device)
    model.embed.weight.data.mul_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for step in range(6):
        tpcore.random.manual_seed(step)
        generator = torch.Generator().manual_seed(10 * step + ctx.coord("dp"))
        ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator).to(ctx.device)
        with tpcore.random.sharded():
            noise = F.dropout(torch.ones(BATCH, LENGTH).to(ctx.device), 0.1).mean()
        optimizer.zero_grad()
        loss = model(ids) + 0 * noise
        loss.backward()
        tpcore.optimizer_step(optimizer, max_norm=1.0)
        scheduler.step()
        if step % 2:
            losses.append(ctx.comm("dp").all_reduce(loss.detach().reshape(1)).item())
    return [(p.compiled, p.digest) for p in programs() if p.what == "sync"]


def test_no_step_compiles_after_the_second():
    compiled = [made for made, _ in on_replicas(4, 2, training)[0]]
    assert compiled == [True, True, False, False, False, False]
