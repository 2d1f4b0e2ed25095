"""What a loss of one's own reads of logits of which each rank has some words: equal to torch on the whole logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm import mappings as ops
from ..comm.comm import Comm
from ..comm.observer import plain
from ..runtime.consensus import gather
from ..runtime.context import current
from ..runtime.digests import are_compared, digest
from .features import unpadded

_ROWS = 16
"""Tokens whose logits ranks compare."""


def words_of(logits: Tensor, vocab_size: int | None, group: Any, function: str) -> tuple[Tensor, Comm, int]:
    """The logits as a plain tensor, the ranks that have the others, and the size of the vocabulary without padding."""
    comm = group if isinstance(group, Comm) else current().comm_for(group)
    if vocab_size is None and hasattr(logits, "words"):  # a model's, of which it knows the parts
        logits, vocab_size = logits.words()
    vocab_size, logits = unpadded(logits) if vocab_size is None else vocab_size, plain(logits)
    width, columns = logits.shape[-1], logits.shape[-1] * comm.size
    if vocab_size is None and width in [*comm.padded]:  # not by a hash, which a symbolic width has not
        raise ValueError(
            f"{function}: a layer with pad=True makes {width} features on each of "
            f"{comm.size} ranks, as many as these logits have; their padding would count as words of the "
            f"vocabulary: pass vocab_size=, the size without padding ({columns} if there is none)"
        )
    vocab = columns if vocab_size is None else vocab_size
    if not 0 < vocab <= columns:
        raise ValueError(f"{function}: vocab_size={vocab} does not fit {width} logits on each of {comm.size} ranks")
    if comm.size > 1 and width == vocab > 1:
        raise _of_whole(function, f"these {width} are those of the whole vocabulary")
    if vocab_size is None:
        refuse_gathered(logits, comm, function)
    return logits, comm, vocab


def refuse_gathered(logits: Tensor, comm: Comm, function: str) -> None:
    """Raise ValueError if ranks have the same logits, in the first calls: gathered ones are of a tp times larger
    vocabulary otherwise. One number in the whole row, as of weights that are zero, says nothing. Collective."""
    if not are_compared({"the logits": logits}, comm, function):
        return
    rows = logits.detach().reshape(-1, logits.shape[-1])
    rows = rows[:: -(-len(rows) // _ROWS) or 1].nan_to_num()
    told = bool((rows != rows[:, :1]).any())
    parts = [tuple(part) for part in gather(digest(rows) if told else [], comm) if part]
    if len(set(parts)) < len(parts):
        what = f"several of {comm.size} ranks have the same {rows.shape[-1]} (pass vocab_size= if by chance)"
        raise _of_whole(function, what)


def _of_whole(function: str, what: str) -> ValueError:
    return ValueError(
        f"{function} takes the logits of each rank's words, and {what}: leave the whole ones to torch's own function "
        "(torch.nn.functional.cross_entropy for a loss), or do not gather them (gather_output=False)"
    )


def padding_of(logits: Tensor, comm: Comm, vocab: int) -> Tensor | None:
    """Mask of padding among this rank's last columns; None if no rank has padding. The rank is data: every
    rank's mask has as many columns as all ranks have padding (or all its columns)."""
    width = logits.shape[-1]
    padded = min(width, width * comm.size - vocab)
    if not padded:
        return None
    return comm.position * width + torch.arange(width - padded, width, device=logits.device) >= vocab


def fill_padding(logits: Tensor, padding: Tensor | None, value: float) -> Tensor:
    """``logits`` with ``value`` in place of padding. Masking a few columns and copying the rest takes less
    than a third of the time of masking all columns (63 MB: 5 ms instead of 17)."""
    if padding is None:
        return logits
    rest = logits.shape[-1] - len(padding)
    return torch.cat([logits[..., :rest], logits[..., rest:].masked_fill(padding, value)], -1)


def log_softmax_parts(logits: Tensor, comm: Comm, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """``logits`` less the largest of their row, on this rank; the log-sum-exp of these on all; and the largest.

    In operations that can be differentiated any number of times, and in forward mode. Padding is -inf.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    words = fill_padding(wide, padding_of(wide, comm, vocab), -torch.inf)
    # a row of -inf less a finite number stays -inf, and is no NaN
    largest = ops.largest(words.amax(-1), comm).clamp(min=torch.finfo(wide.dtype).min)
    words = words - largest.unsqueeze(-1)
    return words, ops.reduce(words.exp().sum(-1), comm).log(), largest


def gather_logits(logits: Tensor, *, vocab_size: int | None = None, group: Any = None) -> Tensor:
    """``[..., vocab / tp]``, this rank's logits -> ``[..., vocab]``, all of them and no padding, on every rank.

    Backward: this rank's part of the gradient of a loss that every rank computes alike. ``vocab_size``: the size
    without padding; the output of a layer with ``pad=True`` carries it. ``group``: the ranks, as in
    ``ColumnParallelLinear``. ValueError for sizes that do not fit, and for logits that are whole already.
    """
    logits, comm, vocab = words_of(logits, vocab_size, group, "gather_logits")
    return ops.collect(logits, comm).narrow(-1, 0, vocab)


def parallel_logsumexp(logits: Tensor, *, vocab_size: int | None = None, group: Any = None) -> Tensor:
    """``torch.logsumexp(whole, -1)``: ``[...]``, the same on every rank, in float32 for half-precision logits.

    Arguments and errors: as in ``gather_logits``.
    """
    logits, comm, vocab = words_of(logits, vocab_size, group, "parallel_logsumexp")
    _, log_sum, largest = log_softmax_parts(logits, comm, vocab)
    return log_sum + largest


def parallel_entropy(logits: Tensor, *, vocab_size: int | None = None, group: Any = None) -> Tensor:
    """The entropy of ``softmax(whole, -1)`` in nats: ``[...]``, the same on every rank, in float32 or wider.

    A word of no probability, as of logit -inf, adds nothing. Arguments and errors: as in ``gather_logits``.
    """
    logits, comm, vocab = words_of(logits, vocab_size, group, "parallel_entropy")
    words, log_sum, _ = log_softmax_parts(logits, comm, vocab)
    share = (words - ops.copy(log_sum, comm).unsqueeze(-1)).exp()
    return log_sum - ops.reduce((share * words.masked_fill(share == 0.0, 0.0)).sum(-1), comm)


def parallel_kl_div(
    logits: Tensor, target_logits: Tensor, *, vocab_size: int | None = None, group: Any = None
) -> Tensor:
    """The divergence of ``softmax(logits)`` from ``softmax(target_logits)``, as for distillation: per token
    ``F.kl_div(log_softmax(logits), log_softmax(target_logits), log_target=True, reduction="none").sum(-1)``.

    Each of the two is this rank's logits, ``[..., vocab / tp]``, or the whole ones, ``[..., vocab]``, alike on every
    rank. Both get gradients. Returns ``[...]``, the same on every rank, in float32 or wider.
    ``vocab_size``, ``group`` and errors: as in ``gather_logits``.
    """
    function, comm = "parallel_kl_div", group if isinstance(group, Comm) else current().comm_for(group)
    if logits.shape[:-1] != target_logits.shape[:-1]:
        raise ValueError(
            f"{function}: logits of shape {tuple(logits.shape)} and {tuple(target_logits.shape)} are of other tokens"
        )
    sizes = vocab_size, *(unpadded(t) for t in (logits, target_logits))
    narrow, wide = sorted((logits.shape[-1], target_logits.shape[-1]))
    known = next((size for size in sizes if size is not None), None)
    if known is None and narrow < wide and narrow != -(-wide // comm.size):
        raise ValueError(
            f"{function}: {narrow} logits are neither the {wide} of the other side nor one of {comm.size} ranks' part "
            "of these; pass vocab_size=, the size without padding, if they are padded"
        )
    vocab = known or (wide if narrow < wide else wide * comm.size)
    width = narrow if narrow < wide or vocab != wide else -(-wide // comm.size)
    if known is None and narrow == wide:
        for t in (logits, target_logits):
            refuse_gathered(plain(t), comm, function)
    here, there = (_part(t, vocab, width, comm, function) for t in (logits, target_logits))
    (words, log_sum, _), (target, target_sum, _) = (log_softmax_parts(t, comm, vocab) for t in (here, there))
    log_share = target - ops.copy(target_sum, comm).unsqueeze(-1)
    share = log_share.exp()
    apart = log_share - (words - ops.copy(log_sum, comm).unsqueeze(-1))
    return ops.reduce((share * apart.masked_fill(share == 0.0, 0.0)).sum(-1), comm)


def _part(logits: Tensor, vocab: int, width: int, comm: Comm, function: str) -> Tensor:
    """This rank's ``width`` logits of ``logits``, which are these or the whole ``vocab``."""
    if comm.size > 1 and logits.shape[-1] == vocab != width:
        return ops.scatter(F.pad(plain(logits), (0, width * comm.size - vocab)), comm)
    return words_of(logits, vocab, comm, function)[0]
