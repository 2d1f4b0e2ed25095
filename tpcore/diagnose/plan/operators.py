"""Operators without FLOPs as a training step has them, for calibration: bytes that one reads and writes, and a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .meter import attention_flops, cost_of

Call = tuple[Any, tuple[Any, ...]]
_aten = torch.ops.aten
_WIDTH = 1024
SIZES = (2**18, 2**21, 2**23, 2**25)
"""Bytes of a tensor: from one in a core's cache to one beyond all caches."""
SAME_AS = {"softmax": "_softmax", "_safe_softmax": "_softmax", "sub": "add", "index_put": "index_select"}
"""Operators that are not run, and the one that they take the rate of."""


def runs(nbytes: int, device: torch.device) -> dict[str, tuple[float, Callable[[], Any]]]:
    """By torch's name: the bytes that one moves, and a run of it, on float32 tensors of ``nbytes``."""
    x, y, z = (torch.rand(nbytes // 4 // _WIDTH, _WIDTH, device=device) + 0.5 for _ in range(3))
    found: dict[str, tuple[float, Callable[[], Any]]] = {}
    for packet, args in (*_elementwise(x, y, z), *_by_rows(x, y)):
        name, _, moved = cost_of(packet, args, {}, packet(*args))
        found[name] = moved, partial(packet, *args)
    return found


def _elementwise(x: Tensor, y: Tensor, z: Tensor) -> Iterator[Call]:
    """``z``: to write to."""
    for op in (_aten.gelu, _aten.silu, _aten.tanh, _aten.exp, _aten.sqrt, _aten.rsqrt, _aten.neg, _aten.clone):
        yield op, (x,)
    for op in (_aten.mul, _aten.add, _aten.div, _aten.gelu_backward, _aten.silu_backward, _aten.tanh_backward):
        yield op, (x, y)
    for op in (_aten.mul_, _aten.div_, _aten.add_):
        yield op, (z, 1.0)
    hidden = x > 1
    yield _aten.copy_, (z, y)
    yield _aten.addcmul_, (z, x, y)
    yield _aten.addcdiv_, (z, x, y)
    yield _aten.lerp_, (z, x, 0.1)
    yield _aten.masked_fill_, (z, hidden, 1.0)
    yield _aten.bernoulli_, (torch.empty_like(z), 0.9)
    yield _aten.where, (hidden, x, y)
    yield _aten.cat, ([x, y],)
    yield _aten.pow, (x, 2)
    yield _aten.new_zeros, (x, list(x.shape))


def _by_rows(x: Tensor, y: Tensor) -> Iterator[Call]:
    rows, scale = len(x), torch.ones(_WIDTH, device=x.device)
    ids = torch.randint(rows, (rows,), device=x.device)
    mean, rstd = x.mean(-1, keepdim=True), torch.ones(rows, 1, device=x.device)
    for op in (_aten.sum, _aten.mean, _aten.amax):
        yield op, (x, [-1])
    yield _aten.linalg_vector_norm, (x,)
    for op in (_aten._softmax, _aten._log_softmax):
        yield op, (x, -1, False)
    for op in (_aten._softmax_backward_data, _aten._log_softmax_backward_data):
        yield op, (x, y, -1, x.dtype)
    yield _aten.native_layer_norm, (x, [_WIDTH], scale, scale, 1e-5)
    yield _aten.native_layer_norm_backward, (y, x, [_WIDTH], mean, rstd, scale, scale, [True] * 3)
    yield _aten.embedding, (x, ids)
    yield _aten.embedding_dense_backward, (y, ids, rows, -1, False)
    yield _aten.index_select, (x, 0, ids)


def attention(device: torch.device) -> tuple[float, Callable[[], Tensor]]:
    """FLOPs of a causal fused attention in float32, forward and backward, and a run of it."""
    q, k, v = (torch.rand(2, 8, 1024, 64, device=device, requires_grad=True) for _ in range(3))

    def run() -> Tensor:
        y: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), y.detach())[0]

    return 3.5 * attention_flops(q, k, v, causal=True), run
