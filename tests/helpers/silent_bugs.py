"""A small training over all axes of a mesh, and mistakes in it that raise no error: each class that is known of large
trainings, made anew."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tpcore
from tpcore.comm import mappings as ops
from tpcore.layers import ContextParallelAttention

D, HEADS, VOCABULARY, TOKENS, ROWS = 16, 4, 24, 8, 4


class Bug(NamedTuple):
    """``axes``: of the smallest mesh that shows it; ``module``: which must be named, with ``direction``, and ``cause``,
    how its cause begins."""

    axes: dict[str, int]
    module: str
    direction: str
    cause: str


BUGS = {
    "embedding mask": Bug({"tp": 2}, "model.embed", "forward", "this module"),
    "recomputed from another input": Bug({"tp": 2}, "model.blocks.1", "backward", "computed again"),
    "cp: loss of a rank's tokens divided by all": Bug({"cp": 2}, "model.head", "backward", "scale"),
    "dp: gradients summed and not averaged": Bug({"dp": 2}, "model.head", "backward", "scale"),
    "zero: head untied from embedding": Bug({"dp": 2}, "model.embed", "backward", "this parameter's"),
    "sp: router's gradient of a rank's tokens": Bug({"tp": 2}, "model.blocks.1.router", "backward", "gradient of a"),
    "sum over another group": Bug({"dp": 2, "tp": 2}, "model.blocks.0.down", "forward", "reads only"),
    "zero: parameter not updated": Bug({"dp": 2}, "model.blocks.0.down", "optimizer", "the optimizer did not"),
    "pp: a layer on no stage": Bug({"pp": 2}, "model.blocks.1", "forward", "this module"),
    "input gradient not waited for": Bug({"tp": 2}, "model.blocks.1.up", "backward", "partial sums"),
    "sp: norm's gradient of a rank's tokens": Bug({"tp": 2}, "model.blocks.1.norm", "backward", "gradient of a rep"),
    "recomputed in another type": Bug({"tp": 2}, "model.blocks.1", "backward", "computed again"),
    "cp: attention's gradient of a rank's queries": Bug(
        {"cp": 2}, "model.blocks.1.attention", "backward", "backward of"
    ),
    "tp and cp: norm's gradient reduced over tp alone": Bug(
        {"cp": 2, "tp": 2}, "model.final", "backward", "gradient of a rep"
    ),
    # beside those
    "row: sum left out": Bug({"tp": 2}, "model.blocks.0.down", "forward", "partial sums"),
    "mask of a rank's own places": Bug({"cp": 2}, "model.blocks.0.attention", "forward", "reads only"),
    "norm of a rank's features": Bug({"tp": 2}, "model.blocks.0.inner", "forward", "reads only"),
    "dropout masks": Bug({"tp": 2}, "model.blocks.0.dropout", "forward", "dropout masks"),
    "initial values": Bug({"tp": 2}, "model.embed", "before the first step", "initial values"),
    "batch of each rank": Bug({"tp": 2}, "model", "forward", "batch"),
    "hook on a part": Bug({"tp": 2}, "model.blocks.0.up", "forward", "hook sees a part"),
    "norm of gradients of a part": Bug({"tp": 2}, "model.head", "backward", "each rank"),
    "gradient of one rank is missing": Bug({"tp": 2}, "model.blocks.1.router", "backward", "a rank has no"),
    "weight decay on one rank": Bug({"tp": 2}, "model.head", "optimizer", "the optimizer"),
}


class _Row(tpcore.RowParallelLinear):
    bug, over = "", None

    def forward(self, x: Tensor) -> Any:
        y = F.linear(x, self.weight)
        if self.bug == "sum over another group":
            y = ops.reduce(y, tpcore.current().comm("dp"))
        return y + self.bias


class _Column(tpcore.ColumnParallelLinear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)  # the copies' gradients are never summed


class _Embedding(tpcore.ParallelEmbedding):
    def forward(self, ids: Tensor) -> Tensor:
        rows = len(self.weight)
        start = rows * tpcore.current().coord("tp")
        here = (ids > start) & (ids < start + rows)
        return ops.reduce(F.embedding((ids - start).clamp(0, rows - 1), self.weight) * here.unsqueeze(-1), self.tp)


class _Attention(nn.Module):
    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug = bug
        column = partial(tpcore.ColumnParallelLinear, D, D, gather_output=False)
        self.q, self.k, self.v = column(), column(), column()
        self.core = ContextParallelAttention()
        self.o = tpcore.RowParallelLinear(D, D, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if self.bug == "mask of a rank's own places":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.bug == "cp: attention's gradient of a rank's queries":
            cp = tpcore.current().comm("cp")
            k, v = (ops.collect(t, cp, 2) for t in (k, v))
            places = torch.arange(q.shape[2]) + tpcore.current().coord("cp") * q.shape[2]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=places[:, None] >= torch.arange(k.shape[2]))
        else:
            y = self.core(q, k, v)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, bug: str, sequence: bool, inner: int) -> None:
        super().__init__()
        self.bug, self.sequence = bug, sequence
        norm = bug.startswith("sp: norm")
        self.norm = nn.LayerNorm(D) if norm else tpcore.LayerNorm(D, sequence_parallel=sequence)
        self.router = nn.Linear(D, 1)
        self.attention = None if sequence else _Attention(bug)
        column = _Column if bug == "input gradient not waited for" else tpcore.ColumnParallelLinear
        row = _Row if bug in ("sum over another group", "row: sum left out") else tpcore.RowParallelLinear
        dim = 1 if sequence else None
        self.up = column(D, 2 * D, gather_output=False, sequence_dim=dim)
        self.inner = nn.LayerNorm(inner) if inner else nn.Identity()
        self.down = row(2 * D, D, input_is_parallel=True, sequence_dim=dim)
        self.down.bug = bug
        self.dropout = nn.Dropout(0.1)
        if bug == "hook on a part":
            self.up.register_forward_hook(lambda module, args, out: out / out.norm())

    def forward(self, x: Tensor) -> Tensor:
        ctx = tpcore.current()
        x = x if self.attention is None else x + self.attention(x)
        y = self.norm(x)
        gate = self.router(y)
        if self.sequence and "router" not in self.bug:
            gate = F.linear(y, *(ops.copy(p, ctx.comm("tp")) for p in (self.router.weight, self.router.bias)))
        if self.bug == "dropout masks":
            torch.manual_seed(ctx.rank)
        return x + self.dropout(self.down(self.inner(F.gelu(self.up(y))))) * gate.sigmoid()


class _Net(nn.Module):
    def __init__(self, bug: str, name: str, tp: int) -> None:
        """``bug``: "" in the right model; ``name``: of the script's, which decides what parts its model has."""
        super().__init__()
        self.bug, self.sequence, self.again = bug, name.startswith("sp:"), name.startswith("recomputed")
        inner = 2 * D // (tp if bug else 1) if name.startswith("norm of a rank") else 0
        self.embed = (_Embedding if bug == "embedding mask" else tpcore.ParallelEmbedding)(VOCABULARY, D)
        blocks = [_Block(bug, self.sequence, inner) for _ in range(2)]
        if bug.startswith("pp:"):
            blocks[1].forward = lambda x: x  # type: ignore[method-assign]
        piped = name.startswith("pp:")
        self.blocks = tpcore.PipelinedLayers(blocks, num_microbatches=2) if piped else nn.ModuleList(blocks)
        self.final = nn.LayerNorm(D) if bug.startswith("tp and cp") else tpcore.LayerNorm(D)
        self.head = nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, tp = self.embed(ids), tpcore.current().comm("tp")
        x = ops.scatter(x, tp, 1) if self.sequence else x
        for i, block in enumerate([self.blocks] if isinstance(self.blocks, tpcore.PipelinedLayers) else self.blocks):
            x = self._checkpointed(block, x, i) if self.again else block(x)
        out: Tensor = self.head(self.final(ops.collect(x, tp, 1) if self.sequence else x))
        return out

    def _checkpointed(self, block: nn.Module, x: Tensor, number: int) -> Tensor:
        calls = 0

        def run(x: Tensor) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2 and number == 1 and self.bug == "recomputed from another input":
                x = x + 1
            if calls == 2 and number == 1 and self.bug == "recomputed in another type":
                x = x.bfloat16().to(x.dtype)
            return block(x)

        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def train(
    name: str,
    tp: int = 1,
    *,
    right: bool = False,
    seed: int = 0,
    steps: int = 2,
    dtype: torch.dtype | None = None,
    microbatches: int | None = None,
) -> None:
    """On this rank, with the mistake of this name, unless the rank is alone or the script ``right``. ``microbatches``:
    of all ranks together; one on each by default."""
    ctx = tpcore.current()
    bug = name if ctx.mesh.size > 1 and not right else ""
    torch.manual_seed(seed + (ctx.rank if bug == "initial values" else 0))
    net = _Net(bug, name, tp)
    if dtype is not None:
        net.to(dtype)
    if name.startswith("zero: head"):
        net.head.weight = nn.Parameter(net.embed.weight.detach().clone()) if bug else net.embed.weight
    zero = name.startswith("zero")
    adamw: Any = partial(tpcore.Zero1, torch.optim.AdamW) if zero else torch.optim.AdamW
    decay = 0.1 if bug.startswith("weight decay") and ctx.rank else 0.0
    optimizer = adamw([*net.parameters()], lr=1e-2, weight_decay=decay)
    if bug == "zero: parameter not updated" and ctx.rank:
        weight = net.blocks[0].down.weight
        before = weight.detach().clone()
        optimizer.register_step_post_hook(lambda *_: weight.data.copy_(before))
    batch, cp = ctx.batch, ctx.over_axis("cp")
    for step in range(steps):
        torch.manual_seed(seed + 100 + step + (ctx.rank if bug == "batch of each rank" else 0))
        every = torch.randint(0, VOCABULARY, (ROWS, TOKENS)).chunk(microbatches or batch.size)
        optimizer.zero_grad()
        mine = len(every) // batch.size
        for rows in every[ctx.index(batch) * mine :][:mine]:
            pair = rows, rows.roll(-1, 1)
            ids, labels = pair if cp is None else (t.chunk(cp.size, 1)[ctx.coord("cp")] for t in pair)
            loss = F.cross_entropy(net(ids).flatten(0, 1), labels.flatten()) / mine
            if bug.startswith("cp: loss"):
                loss = loss / ctx.data.size
            loss.backward()
        _step(bug, net, optimizer)


def _step(bug: str, net: nn.Module, optimizer: Any) -> None:
    ctx = tpcore.current()
    if bug == "gradient of one rank is missing" and ctx.rank:
        net.blocks[1].router.weight.grad = None
    if bug.startswith("dp: gradients"):
        for p in net.parameters():
            p.grad = ctx.comm("dp").all_reduce(p.grad)
        optimizer.step()
    elif bug.startswith("tp and cp"):
        kept = [p.grad.clone() for p in net.final.parameters()]
        tpcore.reduce_gradients(net)
        for p, grad in zip(net.final.parameters(), kept, strict=True):
            p.grad = grad
        optimizer.step()
    elif bug == "norm of gradients of a part":
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for g in grads:
            g.mul_(0.1 / norm)
        optimizer.step()
    else:
        tpcore.optimizer_step(optimizer, max_norm=None if bug.startswith("cp: loss") else 0.1)
