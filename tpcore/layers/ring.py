"""Ring attention: keys pass from rank to rank, and each rank holds those of one rank at a time.

Liu et al. 2023, arXiv:2310.01889; softmax by blocks: Milakov and Gimelshein 2018, arXiv:1805.02867; its backward:
Dao et al. 2022, arXiv:2205.14135.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.comm import Comm
from .tokens import Scoring, TokenOrder, Visible, fold_heads, hidden, repeat_heads

Half = Tensor | int | None
"""Some of a rank's tokens: half 0 or 1, None for all, or a tensor that says whether it is half 0: data, so that
all ranks run one program."""


def take(x: Tensor, half: Half, dim: int) -> Tensor:
    if half is None:
        return x
    first, second = x.chunk(2, dim)
    if isinstance(half, Tensor):
        return torch.where(half, first, second)
    return second if half else first


def put(x: Tensor, half: Half, dim: int, value: Tensor) -> Tensor:
    """``x`` with ``value`` in place of ``take(x, half, dim)``."""
    if half is None:
        return value
    first, second = x.chunk(2, dim)
    if isinstance(half, Tensor):
        return torch.cat([torch.where(half, value, first), torch.where(half, second, value)], dim)
    return torch.cat([first, value] if half else [value, second], dim)


def steps(order: TokenOrder) -> Iterator[tuple[Tensor, list[tuple[Half, Half]]]]:
    """For each step the position of the rank whose keys are here, and the blocks: (which of the queries, which keys).

    In zig-zag a causal mask leaves two half blocks of each step but the first: the second half of the queries sees the
    first half of any keys, and either the first halves see each other or the second ones, by which rank is earlier.
    """
    comm = order.comm
    yield comm.position, [(None, None)]
    for step in range(1, comm.size):
        source = (comm.position - step) % comm.size
        earlier = source < comm.position
        yield source, [(1, 0), (earlier, earlier)] if order.zigzag else [(None, None)]


ROWS = 512
"""Queries whose scores are held at a time: their scores with all keys of a block would be most of the memory."""


def _slices(q: Tensor, queries: Tensor, keys: Tensor, visible: Visible) -> Iterator[tuple[slice, Tensor | None]]:
    """Runs of queries, and which of the keys each of them sees. ``queries``, ``keys``: their places."""
    for start in range(0, q.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        yield rows, visible.mask(queries[rows], keys)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, masks: Iterator[tuple[slice, Tensor | None]], scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys, and the logarithm of its sum of exponentials, ``[..., queries]``."""
    found = []
    for rows, mask in masks:
        scores = hidden(scoring(q[:, :, rows], k), mask)
        total = scores.logsumexp(-1)
        # nan: of a query that sees none of these keys
        found.append(((scores - total.unsqueeze(-1)).exp().nan_to_num(0.0) @ v, total))
    return torch.cat([out for out, _ in found], 2), torch.cat([total for _, total in found], 2)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    results: Sequence[Tensor],
    masks: Iterator[tuple[slice, Tensor | None]],
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block adds to the gradients of its queries, keys and values. ``results``: of the queries, their
    gradient, their logarithm of the sum over all keys, and their gradient times their output."""
    dq, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for rows, mask in masks:
        grad, total, inner = (t[:, :, rows] for t in results)
        scores = scoring(q[:, :, rows], k)
        weights = (hidden(scores, mask) - total.unsqueeze(-1)).exp()
        slopes = weights * (grad @ v.transpose(-1, -2) - inner) * scoring.slope(scores)
        dq.append(slopes @ k)
        dk += slopes.transpose(-1, -2) @ q[:, :, rows]
        dv += weights.transpose(-1, -2) @ grad
    return torch.cat(dq, 2), dk, dv


def _served(q: Tensor, v: Tensor, visible: Visible, order: TokenOrder, scoring: Scoring) -> bool:
    """Whether torch's attention kernel computes every block: then the first is causal, and no other has a mask."""
    masked = visible.window is not None or visible.segments is not None or visible.causal != order.zigzag
    alike = q.shape[-1] == v.shape[-1]
    return q.device.type in ("cpu", "meta") and alike and not masked and scoring.softcap is None


_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What ``scaled_dot_product_attention`` is on a CPU, whose sum of exponentials it keeps to itself. With those of all
keys its backward gives a block's part of the gradients."""


def _merged(out: Tensor, total: Tensor, more: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([total, its]).logsumexp(0)  # logaddexp would leave the program on torch_xla, which has none
    old, new = ((t - both).exp().nan_to_num(0.0).unsqueeze(-1) for t in (total, its))
    return out * old + more * new, both


def _dense(t: Tensor) -> Tensor:
    """``t`` with its features side by side in memory: the kernel takes for granted that they are."""
    return t if t.stride(-1) == 1 else t.contiguous()


Arrival = Callable[[], tuple[Tensor, ...]]
"""Waits for the tensors of the rank before."""


def _around(comm: Comm) -> Callable[[Tensor, Tensor], Arrival]:
    """Starts to send two tensors to the next rank. They travel as one: where ranks share memory, a second permute
    under way waits for the first."""
    to = tuple((i + 1) % comm.size for i in range(comm.size))

    def send(one: Tensor, two: Tensor) -> Arrival:
        wait = comm.start_permute(torch.cat([one, two], -1), to)
        return lambda: wait().tensor_split([one.shape[-1]], -1)

    return send


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, visible: Visible, order: TokenOrder, scoring: Scoring
    ) -> Tensor:
        send, length = _around(order.comm), q.shape[2] * order.comm.size
        q, k, v = (_dense(t) for t in (q, k, v))
        wide = torch.promote_types(q.dtype, torch.float32)  # of sums over many keys
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        total = torch.full_like(q[..., 0], -torch.inf, dtype=wide)
        own, keys, values = order.places(length), k, v
        served = _served(q, v, visible, order, scoring)
        for step, (source, blocks) in enumerate(steps(order), 1):
            # the next rank computes with these after its own: they travel meanwhile
            coming = send(keys, values) if step < order.comm.size else None
            theirs = order.places(length, source)
            for asking, asked in blocks:
                some = take(q, asking, 2).to(wide)
                part = [repeat_heads(take(t, asked, 2), q.shape[1]).to(wide) for t in (keys, values)]
                if served:
                    more = _kernel(some, *part, is_causal=visible.causal and step == 1, scale=scoring.scale)
                else:
                    masks = _slices(some, take(own, asking, 0), take(theirs, asked, 0), visible)
                    more = _attended(some, part[0], part[1], masks, scoring)
                merged = _merged(take(out, asking, 2), take(total, asking, 2), *more)
                out, total = (put(t, asking, 2, m) for t, m in zip((out, total), merged, strict=True))
            keys, values = coming() if coming else (keys, values)
        total = total.masked_fill(total == -torch.inf, 0.0)  # of a query that sees no key: weights of 0, not nan
        ctx.save_for_backward(q, k, v, out, total)
        ctx.arguments = visible, order, scoring
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """A second ring: the gradients of keys and values follow them, and one step more brings them home."""
        q, k, v, out, total = ctx.saved_tensors
        visible, order, scoring = ctx.arguments
        send, length = _around(order.comm), q.shape[2] * order.comm.size
        wide, grad = out.dtype, _dense(grad.to(out.dtype))
        inner = (grad * out).sum(-1, keepdim=True)
        dq, keys, values = torch.zeros_like(q, dtype=wide), k, v
        home: Arrival | None = None
        own, served = order.places(length), _served(q, v, visible, order, scoring)
        for step, (source, blocks) in enumerate(steps(order), 1):
            coming = send(keys, values) if step < order.comm.size else None
            found = [torch.zeros_like(t, dtype=wide) for t in (k, v)]
            theirs = order.places(length, source)
            for asking, asked in blocks:
                some, *results = (take(t, asking, 2) for t in (q.to(wide), grad, total, inner))
                part = [repeat_heads(take(t, asked, 2), q.shape[1]).to(wide) for t in (keys, values)]
                if served:
                    first = visible.causal and step == 1
                    known = take(out, asking, 2), results[1].contiguous(), 0.0, first
                    mine, *more = _kernel_gradients(results[0], some, *part, *known, scale=scoring.scale)
                else:
                    masks = _slices(some, take(own, asking, 0), take(theirs, asked, 0), visible)
                    mine, *more = _gradients(some, part[0], part[1], results, masks, scoring)
                dq = put(dq, asking, 2, take(dq, asking, 2) + mine)
                found = [
                    put(t, asked, 2, take(t, asked, 2) + fold_heads(m, k.shape[1]))
                    for t, m in zip(found, more, strict=True)
                ]
            if home:  # what earlier ranks found has travelled meanwhile
                found = [t + more for t, more in zip(found, home(), strict=True)]
            home = send(found[0], found[1])
            keys, values = coming() if coming else (keys, values)
        dk, dv = cast(Arrival, home)()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, visible: Visible, order: TokenOrder, scoring: Scoring) -> Tensor:
    """Attention in as many steps as there are ranks; memory for the tokens of one rank, forward and backward."""
    made: Tensor = _Ring.apply(q, k, v, visible, order, scoring)
    return made
