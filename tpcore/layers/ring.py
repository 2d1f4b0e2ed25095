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
    runs = []
    for rows, mask in masks:
        scores = hidden(scoring(q[:, :, rows], k), mask)
        total = scores.logsumexp(-1)
        # nan: of a query that sees none of these keys
        runs.append(((scores - total.unsqueeze(-1)).exp().nan_to_num(0.0) @ v, total))
    return torch.cat([out for out, _ in runs], 2), torch.cat([total for _, total in runs], 2)


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


def _merged(out: Tensor, total: Tensor, block_out: Tensor, block_total: Tensor) -> tuple[Tensor, Tensor]:
    # logaddexp would leave the program on torch_xla, which has none
    merged = torch.stack([total, block_total]).logsumexp(0)
    old, new = ((t - merged).exp().nan_to_num(0.0).unsqueeze(-1) for t in (total, block_total))
    return out * old + block_out * new, merged


def _dense(t: Tensor) -> Tensor:
    """``t`` with its features side by side in memory: the kernel takes for granted that they are."""
    return t if t.stride(-1) == 1 else t.contiguous()


Arrival = Callable[[], tuple[Tensor, ...]]
"""Waits for the tensors of the rank before."""


def _around(comm: Comm) -> Callable[[Tensor, Tensor], Arrival]:
    """Starts to send two tensors to the next rank. They travel as one: where ranks share memory, a second permute
    under way waits for the first."""
    destinations = tuple((i + 1) % comm.size for i in range(comm.size))

    def send(first: Tensor, second: Tensor) -> Arrival:
        wait = comm.start_permute(torch.cat([first, second], -1), destinations)
        return lambda: wait().tensor_split([first.shape[-1]], -1)

    return send


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        visible: Visible,
        order: TokenOrder,
        scoring: Scoring,
    ) -> Tensor:
        send, length = _around(order.comm), q.shape[2] * order.comm.size
        q, k, v = (_dense(t) for t in (q, k, v))
        wide = torch.promote_types(q.dtype, torch.float32)  # of sums over many keys
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        total = torch.full_like(q[..., 0], -torch.inf, dtype=wide)
        if sinks is not None:
            total = sinks.to(wide)[:, None].expand_as(total)
        query_places, keys, values = order.places(length), k, v
        served = _served(q, v, visible, order, scoring)
        for step, (source, blocks) in enumerate(steps(order), 1):
            # the next rank computes with these after its own: they travel meanwhile
            arrival = send(keys, values) if step < order.comm.size else None
            key_places = order.places(length, source)
            for q_half, k_half in blocks:
                queries = take(q, q_half, 2).to(wide)
                kv = [repeat_heads(take(t, k_half, 2), q.shape[1]).to(wide) for t in (keys, values)]
                if served:
                    attended = _kernel(queries, *kv, is_causal=visible.causal and step == 1, scale=scoring.scale)
                else:
                    masks = _slices(queries, take(query_places, q_half, 0), take(key_places, k_half, 0), visible)
                    attended = _attended(queries, kv[0], kv[1], masks, scoring)
                merged = _merged(take(out, q_half, 2), take(total, q_half, 2), *attended)
                out, total = (put(t, q_half, 2, m) for t, m in zip((out, total), merged, strict=True))
            keys, values = arrival() if arrival else (keys, values)
        total = total.masked_fill(total == -torch.inf, 0.0)  # of a query that sees no key: weights of 0, not nan
        ctx.save_for_backward(q, k, v, sinks, out, total)
        ctx.arguments = visible, order, scoring
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """A second ring: the gradients of keys and values follow them, and one step more brings them home."""
        q, k, v, sinks, out, total = ctx.saved_tensors
        visible, order, scoring = ctx.arguments
        send, length = _around(order.comm), q.shape[2] * order.comm.size
        wide, grad = out.dtype, _dense(grad.to(out.dtype))
        inner = (grad * out).sum(-1, keepdim=True)
        dq, keys, values = torch.zeros_like(q, dtype=wide), k, v
        home: Arrival | None = None
        query_places, served = order.places(length), _served(q, v, visible, order, scoring)
        for step, (source, blocks) in enumerate(steps(order), 1):
            arrival = send(keys, values) if step < order.comm.size else None
            dkv = [torch.zeros_like(t, dtype=wide) for t in (k, v)]
            key_places = order.places(length, source)
            for q_half, k_half in blocks:
                queries, *results = (take(t, q_half, 2) for t in (q.to(wide), grad, total, inner))
                kv = [repeat_heads(take(t, k_half, 2), q.shape[1]).to(wide) for t in (keys, values)]
                if served:
                    is_causal = visible.causal and step == 1
                    saved = take(out, q_half, 2), results[1].contiguous(), 0.0, is_causal
                    dq_block, *dkv_block = _kernel_gradients(results[0], queries, *kv, *saved, scale=scoring.scale)
                else:
                    masks = _slices(queries, take(query_places, q_half, 0), take(key_places, k_half, 0), visible)
                    dq_block, *dkv_block = _gradients(queries, kv[0], kv[1], results, masks, scoring)
                dq = put(dq, q_half, 2, take(dq, q_half, 2) + dq_block)
                dkv = [
                    put(t, k_half, 2, take(t, k_half, 2) + fold_heads(m, k.shape[1]))
                    for t, m in zip(dkv, dkv_block, strict=True)
                ]
            if home:  # what earlier ranks found has travelled meanwhile
                dkv = [t + remote for t, remote in zip(dkv, home(), strict=True)]
            home = send(dkv[0], dkv[1])
            keys, values = arrival() if arrival else (keys, values)
        dk, dv = cast(Arrival, home)()
        dsinks = None
        if sinks is not None:
            shares = (sinks.to(wide)[:, None] - total).exp()
            dsinks = -(shares * inner.squeeze(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible, order: TokenOrder, scoring: Scoring, sinks: Tensor | None = None
) -> Tensor:
    """Attention in as many steps as there are ranks; memory for the tokens of one rank, forward and backward."""
    output: Tensor = _Ring.apply(q, k, v, sinks, visible, order, scoring)
    return output
