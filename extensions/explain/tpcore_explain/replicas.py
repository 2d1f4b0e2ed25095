"""For debugging: compares hashes of tensors that should be equal on several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcore import nested
from tpcore.layers.sharding import sharding
from tpcore.layout.slices import narrowed
from tpcore.runtime.consensus import gather
from tpcore.runtime.context import ParallelContext, current

BATCH, PARAMETER, GRADIENT = "the batch ({})", "parameter {!r}", "the gradient of {!r}"
STATE, OPTION = "state {!r}", "option {!r}"
_CAUSES = {
    BATCH: "a sampler that counts all ranks and not dp ranks, or augmentation with another seed on each rank",
    PARAMETER: "another seed while the model was built, weights that were loaded or changed on some ranks "
    "only, or a step that some ranks skipped",
    GRADIENT: "tp ranks with different batches or different dropout where activations are replicated, or a "
    "parameter that sees a part of the sequence on each rank and sums its gradient over none (use "
    "tpcore.LayerNorm or tpcore.RMSNorm with sequence_parallel=True)",
    STATE: "a step that some ranks skipped, or a state that was loaded on some ranks only",
    OPTION: "a scheduler that some ranks stepped, or that was loaded on some ranks only",
}


class TensorDigest(NamedTuple):
    """One rank's values of a box of a tensor. Those with one ``kind``, ``name``, ``box`` and ``of`` should be equal."""

    kind: str
    name: str
    box: str
    of: int  # the dp rank, for tensors that differ over dp; the stage, for options
    digest: str
    constant: bool  # all entries are equal
    rank: int


@torch.no_grad()
def check_replicas(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, batch: Any = None) -> None:
    """Raise ValueError on every rank if tensors that should be equal on several ranks are not.

    It compares hashes of parameters, over dp and over the tp ranks that have the same entries; of gradients, over these
    tp ranks (over dp they differ until the mean is taken); with ``optimizer``, plain or ``Zero1``, of its state and of
    its groups' options, ``lr`` among them; with ``batch``, a tensor or nested tensors, of one tp group's inputs, which
    gradients alone may hide, because layers sum over tp. It also finds the opposite: different parts of one tensor with
    equal values, which DistributedDataParallel over all ranks causes. The error names the first tensor, its ranks and
    usual causes. It reads every value: call it occasionally, after backward. Collective over the world.
    """
    ctx = current()
    digests = [
        TensorDigest(*row) for rows in gather([*_digests(model, optimizer, batch, ctx)], ctx.world) for row in rows
    ]
    problem = _difference(digests, ctx) or _equality(digests, ctx)
    if problem is not None:
        raise ValueError(problem)


# -- this rank's tensors -----------------------------------------------------------------------------------
def _digests(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, ctx: ParallelContext
) -> Iterator[TensorDigest]:
    data, stage = ctx.index(ctx.data), ctx.mesh.coords(ctx.rank).get("pp", 0)
    state: Any = {} if optimizer is None else optimizer.state
    for i, value in enumerate(nested.tensors(batch)):
        digest = f"{tuple(value.shape)} {value.dtype} {_digest(value)[0]}"
        yield TensorDigest(BATCH, f"tensor {i}", "", ctx.index(ctx.batch), digest, True, ctx.rank)
    for name, p in model.named_parameters():
        yield from _box_digests(PARAMETER, name, p.detach(), p, 0, ctx)
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = p.grad if p.grad is None or not p.grad.is_sparse else p.grad.to_dense()
            yield from _box_digests(GRADIENT, name, grad, p, data, ctx)
    for name, p in model.named_parameters():
        for key, value in state.get(p, {}).items():
            label = f"{key} of {name}"
            if isinstance(value, Tensor) and value.ndim and value.shape == p.shape:
                yield from _box_digests(STATE, label, value, p, 0, ctx)
            elif isinstance(value, Tensor) and value.ndim:  # a chunk of Zero1: each dp rank has its own
                box = "; ".join(box for box, _ in _boxes(p, p))
                yield TensorDigest(STATE, label, box, data, *_digest(value), ctx.rank)
            else:
                number = repr(None if value is None else float(value))
                yield TensorDigest(STATE, label, "", 0, number, True, ctx.rank)
    for i, group in enumerate(() if optimizer is None else optimizer.param_groups):
        for name, value in group.items():
            option = value.tolist() if isinstance(value, Tensor) else value
            if name not in ("params", "param_names") and isinstance(option, (str, float, int, tuple, list)):
                # stages may have other groups
                yield TensorDigest(OPTION, f"{name} of group {i}", "", stage, repr(option), True, ctx.rank)


def _box_digests(
    kind: str, name: str, value: Tensor | None, p: Tensor, of: int, ctx: ParallelContext
) -> Iterator[TensorDigest]:
    for box, part in _boxes(p if value is None else value, p):
        digest = ("none", True) if value is None else _digest(part)
        yield TensorDigest(kind, name, box, of, *digest, ctx.rank)


def _boxes(value: Tensor, p: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The boxes of the full tensor that ``value`` covers, each with its values."""
    placement = sharding(p)
    if placement is None:
        yield "", value
        return
    for box in placement.layout.boxes(placement.ctx.rank, placement.ctx.mesh):
        yield f"{list(box.full)}+{list(box.size)}", narrowed(value, box.local, box.size)


def _digest(value: Tensor) -> tuple[str, bool]:
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return hashlib.blake2b(data, digest_size=8).hexdigest(), bool((flat == flat[:1]).all())


# -- all ranks' tensors ------------------------------------------------------------------------------------
def _difference(digests: Sequence[TensorDigest], ctx: ParallelContext) -> str | None:
    """A message about the first tensor, in model order, whose values of one box differ between two ranks."""
    first: dict[tuple[str, str, str, int], TensorDigest] = {}
    wrong: dict[tuple[str, str], tuple[TensorDigest, TensorDigest]] = {}
    for entry in digests:
        other = first.setdefault(entry[:4], entry)
        if other.digest != entry.digest:
            wrong.setdefault(entry[:2], (other, entry))
    if not wrong:
        return None
    a, b = wrong[next(entry[:2] for entry in digests if entry[:2] in wrong)]
    missing = " (one has none)" if "none" in (a.digest, b.digest) else ""
    return (
        f"{a.kind.format(a.name)} differs between {_where(a.rank, ctx)} and {_where(b.rank, ctx)}, which should "
        f"hold the same{missing}. Usual causes: {_CAUSES[a.kind]}"
    )


def _equality(digests: Sequence[TensorDigest], ctx: ParallelContext) -> str | None:
    """A message about the first tensor of which two ranks have equal values of different boxes."""
    values = {(h.name, h.rank, h.box): h.digest for h in digests if h.kind == PARAMETER}
    first: dict[tuple[str, str, int, str], TensorDigest] = {}
    for entry in digests:
        if entry.kind not in (PARAMETER, GRADIENT) or entry.constant:
            continue
        other = first.setdefault((entry.kind, entry.name, entry.of, entry.digest), entry)
        # equal weights may have equal gradients
        alike = values[entry.name, entry.rank, entry.box] == values[other.name, other.rank, other.box]
        if other.box != entry.box and (entry.kind == PARAMETER or not alike):
            a, b = _where(other.rank, ctx), _where(entry.rank, ctx)
            return (
                f"{entry.kind.format(entry.name)} has the same values on {a} and {b}, which hold different parts of "
                f"it, {other.box} and {entry.box} (start + size). Usual cause: it was broadcast or averaged over "
                "tp, as DistributedDataParallel over all ranks does: give it "
                'process_group=ctx.comm("dp").process_group'
            )
    return None


def _where(rank: int, ctx: ParallelContext) -> str:
    coords = ", ".join(f"{axis} {i}" for axis, i in ctx.mesh.coords(rank).items() if ctx.mesh.axes[axis] > 1)
    return f"rank {rank} ({coords})" if coords else f"rank {rank}"
