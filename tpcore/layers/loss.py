"""Cross entropy over vocabulary-cut logits: one collective, no temporary larger than the local logits.

Each rank contributes a few numbers per token: the log-sum-exp over its part of the vocabulary, the target's
logit if it is there, and for label smoothing the sum of its logits. One all-gather collects them. All ranks
combine them in the same order, so the loss is the same on all. With ``reproducible`` each rank has several blocks of
the vocabulary, and contributes such numbers for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..private import recorded
from ..runtime.context import current, is_initialized
from ..runtime.digests import compare_inputs
from .embedding import check_ids, own_places
from .vocabulary import fill_padding, log_softmax_parts, padding_of, words_of

CHUNK = 1 << 18
"""Logits per step on a CPU: 1 MiB of float32 stays in a core's cache."""
DEVICE_CHUNK = 1 << 26
"""The same on a device with a queue: few kernels, each far longer than its launch, and 256 MiB of float32."""


def _eager(comm: Comm, *tensors: Tensor) -> bool:
    """Whether Python may loop and write in place: not on lazy devices, and not into a graph."""
    return comm.eager and not recorded(*tensors)


def _chunks(logits: Tensor, comm: Comm) -> Iterator[slice]:
    """Runs of tokens. One run on lazy backends: their compilers fuse, and a loop would grow the graph."""
    tokens, width = logits.shape
    limit = CHUNK if comm.reads_are_cheap else DEVICE_CHUNK
    step = max(1, limit // max(1, width)) if _eager(comm) else max(1, tokens)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _in_blocks(logits: Tensor, comm: Comm) -> Tensor:
    blocks: Tensor = logits.unflatten(-1, (comm.blocks or 1, -1))
    return blocks


def _local_softmax(
    logits: Tensor, padding: Tensor | None, comm: Comm, reads: bool, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax over each of this rank's blocks of columns, in ``out`` if given, and the log-sum-exp of these columns.

    One fused kernel gives both: the largest softmax of a row is 1 / sum(exp(row - max(row))).
    """
    lowest = torch.finfo(logits.dtype).min
    logits = _in_blocks(fill_padding(logits, padding, lowest), comm)
    share = torch.softmax(logits, -1, out=None if out is None else _in_blocks(out, comm))
    largest = logits.amax(-1)
    log_sum = largest - share.amax(-1).log()
    if reads and largest.amin() > lowest:
        return share, log_sum
    # Rows with only -inf or padding on this rank have softmax 0 here, not nan. Their maximum is -inf, and on
    # torch_xla the lowest finite number.
    empty = largest <= lowest
    return share.masked_fill_(empty.unsqueeze(-1), 0.0), torch.where(empty, largest, log_sum)


class _CrossEntropy(torch.autograd.Function):
    """Forward saves this rank's softmax if the dtype of the logits is wide enough. Backward rescales it in
    place and returns it as the gradient: no second exponential, and no further temporary."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, comm: Comm, smoothing: float, ignore: int, vocab: int
    ) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        local, away, ignored = _located(target, logits.shape[-1], comm, ignore)
        padding = padding_of(logits, comm, vocab)

        softmax, reads = None, comm.reads_are_cheap and _eager(comm, logits)
        if _eager(comm) and logits.dtype is wide and ctx.needs_input_grad[0]:
            softmax = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows = logits.new_empty((comm.blocks or 1, 3 if smoothing else 2, len(target)), dtype=wide)
        for at in _chunks(logits, comm):
            chunk = logits[at].to(wide)
            if smoothing:
                rows[:, 2, at] = _in_blocks(fill_padding(chunk, padding, 0.0), comm).sum(-1).t()
            out = None if softmax is None else softmax[at]
            rows[:, 0, at] = _local_softmax(chunk, padding, comm, reads, out)[1].t()
        if comm.blocks is not None:
            rows[1:, 1] = 0.0  # only one number is another
        rows[0, 1] = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(away, 0.0)

        gathered = comm.all_gather(rows, 0)
        log_sum = gathered[:, 0].logsumexp(0)
        target_logit = gathered[:, 1].sum(0)
        if smoothing:
            loss = log_sum - (1 - smoothing) * target_logit - smoothing / vocab * gathered[:, 2].sum(0)
        else:
            loss = log_sum - target_logit
        ctx.save_for_backward(logits, (rows[:, 0] - log_sum).exp().t(), local, away, ignored)
        ctx.args, ctx.softmax = (comm, smoothing, vocab), softmax
        return loss.masked_fill(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, part, local, away, ignored = ctx.saved_tensors
        comm, smoothing, vocab = ctx.args
        if torch.is_grad_enabled():  # this backward is itself differentiated
            loss = _mapped(logits, local, away, ignored, comm, smoothing, vocab)
            return *torch.autograd.grad(loss, logits, grad, create_graph=True), *[None] * 5
        # becomes the gradient: a second backward through a retained graph computes the softmax again
        softmax, ctx.softmax = ctx.softmax, None
        padding = padding_of(logits, comm, vocab)
        # filled, and not multiplied: the gradient of a mean over no tokens is inf
        scale = grad.masked_fill(ignored, 0.0).to(part.dtype).unsqueeze(-1)
        part = part.unsqueeze(-1) * scale.unsqueeze(-1)
        hit = (scale * (smoothing - 1)).masked_fill(away.unsqueeze(-1), 0.0)
        out = torch.empty_like(logits, memory_format=torch.contiguous_format) if softmax is None else softmax
        for at in _chunks(logits, comm):
            if softmax is None:
                reads = comm.reads_are_cheap and _eager(comm, logits)
                chunk, _ = _local_softmax(logits[at].to(part.dtype), padding, comm, reads, None)
            else:
                chunk = _in_blocks(softmax[at], comm)
            chunk = chunk.mul_(part[at]).flatten(1)
            if smoothing:
                chunk.sub_(scale[at] * (smoothing / vocab))
                if padding is not None:
                    chunk[:, -len(padding) :].masked_fill_(padding, 0.0)
            chunk.scatter_add_(-1, local[at].unsqueeze(-1), hit[at])
            if softmax is None:
                out[at] = chunk
        return out, *[None] * 5


def _located(target: Tensor, width: int, comm: Comm, ignore: int) -> tuple[Tensor, Tensor, Tensor]:
    """The column of each target among this rank's, whether it is another rank's, and whether it is ignored."""
    local, here = own_places(target, width, comm)  # or that of an ignored one, whose loss and gradient become 0
    return local, ~here, target == ignore


def _mapped(
    logits: Tensor, local: Tensor, away: Tensor, ignored: Tensor, comm: Comm, smoothing: float, vocab: int
) -> Tensor:
    """The loss in operations that can be differentiated any number of times, and in forward mode."""
    _, log_sum, largest = log_softmax_parts(logits, comm, vocab)
    wide = logits.to(log_sum.dtype)
    hit = wide.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(away, 0.0)
    loss = log_sum + largest - (1 - smoothing) * ops.reduce(hit, comm)
    if smoothing:
        words = fill_padding(wide, padding_of(wide, comm, vocab), 0.0)
        loss = loss - smoothing / vocab * ops.reduce(words.sum(-1), comm)
    return loss.masked_fill(ignored, 0.0)


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    *,
    vocab_size: int | None = None,
    group: Any = None,
) -> Tensor:
    """Per-token loss, as ``F.cross_entropy(..., reduction="none")`` of the gathered logits.

    ``vocab_parallel_logits``: ``[..., vocab / tp]``, this rank's part of the vocabulary; not modified. ``target``:
    int64 ``[...]``, the same on every rank: ids in the whole vocabulary, or ``ignore_index`` for loss 0 and no
    gradient. ``vocab_size``: the size without padding, which does not count in the loss. The output of a layer with
    ``pad=True`` carries its size; pass it if other operations follow the layer: without it they are a ValueError.

    Returns ``[...]``, the same on every rank, in float32 for half-precision logits. ValueError for shapes
    that do not fit, and in the first calls for logits that ranks have alike, as gathered ones. Backends that can
    read values also raise IndexError for a target out of range.
    """
    logits, comm, vocab = words_of(vocab_parallel_logits, vocab_size, group, "parallel_cross_entropy")
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of {tuple(logits.shape[:-1])}, "
            f"not {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], not {label_smoothing}")
    if comm.eager:
        check_ids(target, vocab, "parallel_cross_entropy", ignore_index, read=comm.reads_are_cheap)
        if not torch.compiler.is_compiling() and is_initialized() and (observer := current().observer) is not None:
            observer.same("the targets of parallel_cross_entropy", target)
        compare_inputs({"the targets of parallel_cross_entropy": target}, comm, "targets")
    flat = logits.reshape(-1, logits.shape[-1])
    if ops.transformed():
        placed = _located(target.reshape(-1), flat.shape[-1], comm, ignore_index)
        return _mapped(flat, *placed, comm, label_smoothing, vocab).view(target.shape)
    loss: Tensor = _CrossEntropy.apply(flat, target.reshape(-1), comm, label_smoothing, ignore_index, vocab)
    return loss.view(target.shape)


def parallel_log_softmax(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, *, vocab_size: int | None = None, group: Any = None
) -> Tensor:
    """The log-probability of each label, ``log_softmax(whole, -1)`` at it: ``[...]``, the same on every rank, in
    float32 or wider; 0 for ``ignore_index``. Arguments and errors: as in ``parallel_cross_entropy``."""
    return -parallel_cross_entropy(logits, labels, 0.0, ignore_index, vocab_size=vocab_size, group=group)
