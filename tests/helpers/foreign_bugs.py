"""A training with the sharded layers of other libraries, and mistakes in it that raise no error."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tpcore_explain.verify.script.record import ScriptRecorder, Trace
from tpcore_explain.verify.script.run import ScriptMode

D, VOCABULARY, TOKENS, ROWS = 16, 24, 8, 4

# module that must be named, direction, and how the cause begins
BUGS = {
    "embedding mask": ("model.table", "forward", "this module"),
    "recomputed from another input": ("model.blocks.1", "backward", "computed again"),
    "recomputed in another type": ("model.blocks.1", "backward", "computed again"),
    "dp: gradients summed and not averaged": ("model.head", "backward", "scale"),
    "sp: router's gradient of a rank's tokens": ("model.blocks.1.router", "backward", "gradient of a rep"),
    "sp: norm's gradient of a rank's tokens": ("model.blocks.1.norm", "backward", "gradient of a rep"),
    "parameter not updated": ("model.blocks.0.down", "optimizer", "the optimizer did not"),
    "input gradient not summed": ("model.blocks.1.up", "backward", "partial sums"),
    "sum left out": ("model.blocks.0.down", "forward", "partial sums"),
    "norm of a rank's features": ("model.blocks.0.inner", "forward", "reads only"),
    "dropout masks": ("model.blocks.0.dropout", "forward", "dropout masks"),
    "initial values": ("model.head", "before the first step", "initial values"),
    "batch of each rank": ("model", "forward", "batch"),
    "hook on a part": ("model.blocks.0.up", "forward", "hook sees a part"),
    "norm of gradients of a part": ("model.head", "backward", "each rank"),
    "gradient of one rank is missing": ("model.blocks.1.router", "backward", "a rank has no"),
    "weight decay on one rank": ("model.head", "optimizer", "the optimizer"),
}


class _Split(torch.autograd.Function):
    """This rank's tokens; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _gathered(grad)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _gathered(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def _gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def _first(value: Any) -> Tensor:
    out: Tensor = value[0] if isinstance(value, tuple) else value  # Megatron's layers return a bias beside it
    return out


class _Block(nn.Module):
    def __init__(self, name: str, bug: str, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.bug, self.of_tokens = bug, name.partition("'")[0] if name.startswith("sp: ") else ""
        self.norm, self.router, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 1), up, down
        inner = 2 * D // (dist.get_world_size() if bug else 1) if name.startswith("norm of a rank") else 0
        self.inner = nn.LayerNorm(inner) if inner else nn.Identity()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self._of_tokens("sp: norm", self.norm, x)
        gate = self._of_tokens("sp: router", self.router, y)
        z = _first(self.down(self.inner(F.gelu(_first(self.up(y))))))
        if self.bug == "dropout masks":
            torch.manual_seed(dist.get_rank())
        return x + self.dropout(z) * gate.sigmoid()

    def _of_tokens(self, name: str, module: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = _Gather.apply(module(_Split.apply(x))) if self.of_tokens == name else module(x)
        return out


class _Net(nn.Module):
    def __init__(self, name: str, bug: str, table: nn.Module, pairs: Sequence[Sequence[nn.Module]]) -> None:
        super().__init__()
        self.bug, self.again, self.table = bug, name.startswith("recomputed"), table
        self.blocks = nn.ModuleList(_Block(name, bug, *pair) for pair in pairs)
        self.final, self.head = nn.LayerNorm(D), nn.Linear(D, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for i, block in enumerate(self.blocks):
            x = self._checkpointed(block, x, i) if self.again else block(x)
        out: Tensor = self.head(self.final(x))
        return out

    def _checkpointed(self, block: nn.Module, x: Tensor, number: int) -> Tensor:
        calls = 0

        def run(x: Tensor) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2 and number == 1 and self.bug == "recomputed from another input":
                x = x + torch.arange(D)  # a norm does not see a sum with one number
            if calls == 2 and number == 1 and self.bug == "recomputed in another type":
                x = x.bfloat16().to(x.dtype)
            return block(x)

        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


def _dtensor(make: Callable[..., _Net], tp: int) -> _Net:
    pairs = [(nn.Linear(D, 2 * D), nn.Linear(2 * D, D)) for _ in range(2)]
    net = make(nn.Embedding(VOCABULARY, D), pairs)
    plan = {"table": RowwiseParallel(input_layouts=Replicate())}
    for i in range(2):
        plan |= {f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel()}
    if tp == dist.get_world_size():
        parallelize_module(net, init_device_mesh("cpu", (tp,)), plan)
    return net


def _megatron(make: Callable[..., _Net], tp: int) -> _Net:
    state = import_module("megatron.core.parallel_state")
    layers = import_module("megatron.core.tensor_parallel.layers")
    state.destroy_model_parallel()
    state.initialize_model_parallel(tensor_model_parallel_size=tp)
    sizes = {
        "tensor_model_parallel_size": tp,
        "use_cpu_initialization": True,
        "params_dtype": torch.get_default_dtype(),
    }
    config = import_module("megatron.core.model_parallel_config").ModelParallelConfig(**sizes)
    common: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_}
    rest = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
    pairs = [
        (
            layers.ColumnParallelLinear(D, 2 * D, gather_output=False, **common),
            layers.RowParallelLinear(2 * D, D, **rest, **common),
        )
        for _ in range(2)
    ]
    return make(layers.VocabParallelEmbedding(VOCABULARY, D, **common), pairs)


def _fairscale(make: Callable[..., _Net], tp: int) -> _Net:
    library = import_module("fairscale.nn.model_parallel")
    layers = import_module("fairscale.nn.model_parallel.layers")
    library.destroy_model_parallel()
    library.initialize_model_parallel(tp)
    pairs = [
        (
            layers.ColumnParallelLinear(D, 2 * D, gather_output=False),
            layers.RowParallelLinear(2 * D, D, input_is_parallel=True),
        )
        for _ in range(2)
    ]
    return make(layers.VocabParallelEmbedding(VOCABULARY, D), pairs)


LIBRARIES = {"torch": _dtensor, "megatron.core": _megatron, "fairscale": _fairscale}


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _without_sums(layer: Any) -> None:
    """The layer multiplies what the rank has, and neither forward nor backward sums."""
    for hooks in (layer._forward_hooks, layer._forward_pre_hooks):  # by which torch's sharded layers sum
        hooks.clear()
    several = "megatron" in type(layer).__module__

    def forward(x: Tensor) -> Any:
        y = F.linear(x, _local(layer.weight)) + _local(layer.bias)
        return (y, None) if several else y

    layer.forward = forward


def _spoiled(net: Any, bug: str) -> None:
    if bug == "embedding mask":
        forward = net.table.forward
        net.table.forward = lambda ids: forward(ids) * (ids != VOCABULARY // 2).unsqueeze(-1)
    elif bug == "sum left out":
        _without_sums(net.blocks[0].down)
    elif bug == "input gradient not summed":
        _without_sums(net.blocks[1].up)
    elif bug == "hook on a part":
        net.blocks[0].up.register_forward_hook(
            lambda module, args, out: (out[0] / out[0].norm(), out[1]) if isinstance(out, tuple) else out / out.norm()
        )
    elif bug == "initial values":
        torch.manual_seed(dist.get_rank())
        nn.init.normal_(net.head.weight)


def train(library: str, name: str, seed: int, dtype: torch.dtype | None, right: bool) -> None:
    """Two steps, with the mistake of this name unless the rank is alone or ``right``."""
    size, rank = dist.get_world_size(), dist.get_rank()
    bug = name if size > 1 and not right else ""
    dp = size if name.startswith("dp") else 1
    torch.manual_seed(seed)
    net: Any = LIBRARIES[library](lambda *parts: _Net(name, bug, *parts), size // dp)
    net.to(dtype)
    _spoiled(net, bug)
    decay = 0.1 if bug.startswith("weight decay") and rank else 0.0
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=decay, foreach=False)
    if bug == "parameter not updated" and rank:
        weight = _local(net.blocks[0].down.weight)
        before = weight.detach().clone()
        optimizer.register_step_post_hook(lambda *_: weight.data.copy_(before))
    for step in range(2):
        torch.manual_seed(seed + 100 + step + (rank if bug == "batch of each rank" else 0))
        ids = torch.randint(0, VOCABULARY, (ROWS, TOKENS)).chunk(dp)[rank % dp]
        optimizer.zero_grad()
        F.cross_entropy(net(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        _reduced(net, name, bug, dp)
        optimizer.step()


def _reduced(net: Any, name: str, bug: str, dp: int) -> None:
    """What a script does between backward and step."""
    part = {"sp: norm": ".norm.", "sp: router": ".router."}.get(name.partition("'")[0])
    for path, p in net.named_parameters():
        assert p.grad is not None
        grad = _local(p.grad)
        if (part is not None and part in path and not bug) or dp > 1:
            dist.all_reduce(grad)
            grad.div_(1 if part or bug else dp)
    if bug == "gradient of one rank is missing" and dist.get_rank():
        net.blocks[1].router.weight.grad = None
    if name == "norm of gradients of a part":  # which is right in one process
        norm = torch.stack([_local(p.grad).norm() for p in net.parameters() if p.grad is not None]).norm()
        for p in net.parameters():
            _local(p.grad).mul_(0.1 / norm)


def traces(library: str, cases: Sequence[tuple[Any, ...]], double: bool) -> list[Trace]:
    """On this rank of a job of its own: one of each case, (name, seed, dtype, right, whether with noise)."""
    os.environ["TPCORE_CHECK"] = "off"
    torch.set_default_dtype(torch.float64 if double else torch.float32)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = []
    for name, seed, dtype, right, noise in cases:
        recorder = ScriptRecorder(2, noise=noise, double=double)
        with recorder, ScriptMode(recorder, double and "type" not in name):
            train(library, name, seed, dtype, right)
        found.append(recorder.trace)
    dist.destroy_process_group()
    return found
