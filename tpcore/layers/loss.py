"""Cross entropy over vocabulary-cut logits: one collective, no temporary larger than the local logits.

Each rank needs from the others only a few numbers per token: the log-sum-exp over their part of the
vocabulary, the target's logit where they hold it, and for label smoothing the sum of their logits. All
ranks gather these in one exchange and combine them in the same order, so the loss is the same on all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..checks import Checks, plain
from ..comm import Comm
from ..context import current, is_initialized
from .features import unpadded
from .ids import check_ids

CHUNK = 1 << 18
"""Logits worked on at once where the backend is eager: 1 MiB of float32 stays in a core's cache."""


def _looks(comm: Comm) -> bool:
    """Whether values may be looked at: not on lazy devices, and not by torch.compile."""
    return comm.eager and not torch.compiler.is_dynamo_compiling()


def _chunks(logits: Tensor, comm: Comm) -> Iterator[slice]:
    """Runs of tokens. A single one on lazy backends: their compilers fuse, and a loop is a longer graph."""
    tokens, width = logits.shape
    step = max(1, CHUNK // max(1, width)) if _looks(comm) else max(1, tokens)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _share(logits: Tensor, padding: Tensor | None, eager: bool, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over this rank's columns alone, in ``out`` if given, and the log-sum-exp of those columns.

    One fused kernel gives both: a row's largest softmax is 1 / sum(exp(row - its largest)).
    """
    logits = _fill(logits, padding, torch.finfo(logits.dtype).min)
    share = torch.softmax(logits, -1, out=out)
    largest = logits.amax(-1)
    # Another rank has all that this token may be: no share here, and no nan. The largest of nothing but -inf
    # is -inf, and on torch_xla the least number.
    empty = largest <= torch.finfo(largest.dtype).min
    log_sum = torch.where(empty, largest, largest - share.amax(-1).log())
    if not eager or empty.is_meta or empty.any():
        share.masked_fill_(empty.unsqueeze(-1), 0.0)
    return share, log_sum


class _CrossEntropy(torch.autograd.Function):
    """Forward leaves behind what is nearly the gradient, where that costs no precision: this rank's softmax
    in the dtype of the logits. Backward rescales it in place, and so neither takes an exponential twice nor
    holds a temporary beside the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        comm: Comm,
        smoothing: float,
        ignore: int,
        vocab: int,
        certain: bool,
    ) -> Tensor:
        width = logits.shape[-1]
        wide = torch.promote_types(logits.dtype, torch.float32)
        local = target - comm.position * width
        kept = target != ignore
        mine = (local >= 0) & (local < width) & kept
        local = local * mine
        padding = _padding(logits, comm, vocab)

        ahead = None
        if _looks(comm) and logits.dtype is wide and ctx.needs_input_grad[0]:
            ahead = torch.empty_like(logits, memory_format=torch.contiguous_format)
        tokens, look = len(target), _looks(comm) and not certain and comm.size > 1 and logits.numel() > 0
        # with one place more, for what tells padding
        rows = logits.new_empty((3 if smoothing else 2, tokens + look), dtype=wide)
        for at in _chunks(logits, comm):
            chunk = logits[at].to(wide)
            if smoothing:
                rows[2, at] = _fill(chunk, padding, 0.0).sum(-1)
            _, rows[0, at] = _share(chunk, padding, _looks(comm), None if ahead is None else ahead[at])
        picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).to(wide)
        rows[1, :tokens] = torch.where(mine, picked, torch.zeros_like(picked))
        if look:
            rows[:2, -1] = logits[:, [0, -1]].ne(0).any(0).to(wide)

        gathered = comm.all_gather(rows.unsqueeze(0), 0)
        if look:
            _refuse_padding(gathered[:, :2, -1], width * comm.size)
        gathered = gathered[..., :tokens]
        log_sum = gathered[:, 0].logsumexp(0)
        loss = log_sum - (1 - smoothing) * gathered[:, 1].sum(0)
        if smoothing:
            loss = loss - smoothing / vocab * gathered[:, 2].sum(0)
        ctx.save_for_backward(logits, (rows[0, :tokens] - log_sum).exp(), local, mine, kept)
        ctx.args, ctx.ahead = (comm, smoothing, vocab), ahead
        return torch.where(kept, loss, torch.zeros_like(loss))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, part, local, mine, kept = ctx.saved_tensors
        comm, smoothing, vocab = ctx.args
        # given away as the gradient: a second backward through a retained graph computes its own
        ahead, ctx.ahead = ctx.ahead, None
        padding = _padding(logits, comm, vocab)
        # where, not a product: a mean over no tokens at all sends back inf
        scale = torch.where(kept, grad, torch.zeros_like(grad)).to(part.dtype).unsqueeze(-1)
        part = part.unsqueeze(-1) * scale
        hit = (mine.to(part.dtype) * (smoothing - 1)).unsqueeze(-1) * scale
        out = torch.empty_like(logits, memory_format=torch.contiguous_format) if ahead is None else ahead
        for at in _chunks(logits, comm):
            if ahead is None:
                chunk, _ = _share(logits[at].to(part.dtype), padding, _looks(comm), None)
            else:
                chunk = ahead[at]
            chunk.mul_(part[at])
            if smoothing:
                chunk.sub_(scale[at] * (smoothing / vocab))
                if padding is not None:
                    chunk[:, -len(padding) :].masked_fill_(padding, 0.0)
            chunk.scatter_add_(-1, local[at].unsqueeze(-1), hit[at])
            if ahead is None:
                out[at] = chunk
        return out, None, None, None, None, None, None


def _refuse_padding(nonzero: Tensor, columns: int) -> None:
    """ValueError if the last column of all looks like padding. ``nonzero``: ``[ranks, 2]``, whether the first
    and the last column of a rank hold anything but exact zeros, as padding does for every token."""
    if not nonzero.is_meta and nonzero[0, 0] and not nonzero[-1, 1]:
        raise ValueError(
            f"parallel_cross_entropy: the last of {columns} logits is exactly 0 for every token, as padding "
            "is, and would count as a word of the vocabulary: pass vocab_size=, the size without padding "
            f"({columns} if there is none)"
        )


def _padding(logits: Tensor, comm: Comm, vocab: int) -> Tensor | None:
    """Which of this rank's last columns are padding; None if no rank has any. The rank stays data: as many
    columns are looked at as there is padding in all, which is the same number on every rank."""
    width = logits.shape[-1]
    some = min(width, width * comm.size - vocab)
    if not some:
        return None
    return comm.position * width + torch.arange(width - some, width, device=logits.device) >= vocab


def _fill(logits: Tensor, padding: Tensor | None, value: float) -> Tensor:
    """``logits`` with another value where padding is. To mask a few columns and copy the rest takes a
    quarter of the time that a mask of all columns does (63 MB: 5 ms, not 17)."""
    if padding is None:
        return logits
    rest = logits.shape[-1] - len(padding)
    return torch.cat([logits[:, :rest], logits[:, rest:].masked_fill(padding, value)], -1)


def _checks() -> Checks | None:
    return None if torch.compiler.is_compiling() or not is_initialized() else current().checks


def parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    *,
    vocab_size: int | None = None,
    tensor_model_parallel_group: Any = None,
) -> Tensor:
    """Per-token loss, as ``F.cross_entropy(..., reduction="none")`` of the gathered logits.

    ``vocab_parallel_logits``: ``[..., vocab / tp]``, this rank's part of the vocabulary, left as it is.
    ``target``: int64 ``[...]``, the same on every rank, ids in the whole vocabulary or ``ignore_index``
    (those give loss 0 and no gradient). ``vocab_size``: the size without padding, where the layer that
    made the logits was padded (``pad=True``); the padding then counts for nothing. The layer's own output
    tells it; what other operations made of that needs it.

    Returns ``[...]``, in float32 for half-precision logits, the same on every rank. Raises IndexError for
    a target out of range, on backends that can look at values, ValueError for shapes that do not fit and, on
    the same backends, for what looks like padding without ``vocab_size``.
    """
    logits, group = vocab_parallel_logits, tensor_model_parallel_group
    comm = group if isinstance(group, Comm) else current().comm_for(group)
    vocab_size, logits = unpadded(logits) if vocab_size is None else vocab_size, plain(logits)
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} need targets of {tuple(logits.shape[:-1])}, "
            f"not {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], not {label_smoothing}")
    columns = logits.shape[-1] * comm.size
    vocab = columns if vocab_size is None else vocab_size
    if not 0 < vocab <= columns:
        raise ValueError(
            f"vocab_size={vocab} does not fit {logits.shape[-1]} logits on each of {comm.size} ranks"
        )
    if comm.eager:
        check_ids(target, vocab, "parallel_cross_entropy", ignore_index)
    if (checks := _checks()) is not None:
        checks.same("the targets of parallel_cross_entropy", target)
    flat = logits.reshape(-1, logits.shape[-1])
    loss: Tensor = _CrossEntropy.apply(
        flat, target.reshape(-1), comm, label_smoothing, ignore_index, vocab, vocab_size is not None
    )
    return loss.view(target.shape)
