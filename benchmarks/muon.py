"""A step of Muon: torch's own on the whole matrices on every rank, and tpcore's over tp and over dp.

The model is a stack of transformer layers' matrices, without a forward: gradients are drawn once, and only the step is
timed, with the mean over dp where there is one (the floor takes it too, as tpcore does without Zero1). Contestants take
turns in the same two processes, one thread each. The floor is what one process does without tensor parallelism: all
matrices on each rank. After the race all hold the same weights, of their shard.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tpcore
from tpcore.layers.sharding import sharding

from .harness import Contestant, check_equal, conditions, race, say, start, table

SIZES = {"large": (768, 2304, 6, 5), "small": (256, 768, 4, 7), "tiny": (16, 48, 2, 2)}
"""Hidden and inner features, layers, rounds."""
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""Of the largest weight: the dtype rounds what is orthogonalized, and sums over ranks are in another order."""
LR = 0.02


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)


def model_of(size: str, *, sharded: bool) -> nn.Module:
    hidden, inner, layers, _ = SIZES[size]
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(hidden, inner) for _ in range(layers)))
    for layer in model.children() if sharded else ():
        for name in ("q", "k", "v", "gate", "up"):
            setattr(layer, name, tpcore.ColumnParallelLinear.from_plain(getattr(layer, name), gather_output=False))
        for name in ("o", "down"):
            setattr(layer, name, tpcore.RowParallelLinear.from_plain(getattr(layer, name), input_is_parallel=True))
    return model


def gradients_of(model: nn.Module) -> dict[Tensor, Tensor]:
    """The same of every contestant: this rank's shards."""
    made = torch.Generator().manual_seed(1)
    drawn: dict[Tensor, Tensor] = {}
    for p in model.parameters():
        mark = sharding(p)
        whole = torch.randn(p.shape if mark is None else mark.layout.shape, generator=made)
        drawn[p] = whole if mark is None else mark.part(whole)
    return drawn


def dtype_here() -> torch.dtype:
    """bfloat16, of torch's Muon, unless its products take more than twice the time of float32's."""
    spent = [min(timeit.repeat(partial(torch.mm, x, x), number=1, repeat=3)) for x in _squares()]
    return torch.bfloat16 if spent[0] < 2 * spent[1] else torch.float32


def _squares() -> list[Tensor]:
    return [torch.ones(256, 256, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]


class Wide(TorchFunctionMode):
    """What becomes bfloat16 stays as it is: torch's Muon has no option for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.clone if func is Tensor.bfloat16 else func)(*args, **(kwargs or {}))


class Both(torch.optim.Optimizer):
    """torch's Muon for matrices and its AdamW for the rest."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._around = nullcontext() if dtype is torch.bfloat16 else Wide()
        matrices = [p for p in model.parameters() if p.ndim == 2]
        super().__init__(matrices, {})
        self._parts = (
            torch.optim.Muon(matrices, lr=LR),
            torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=LR),
        )

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with self._around:
            for part in self._parts:
                part.step()


def contestant(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Contestant:
    gradients = gradients_of(model)

    def before() -> None:
        for p, gradient in gradients.items():
            p.grad = gradient.clone()

    return Contestant(name, partial(tpcore.optimizer_step, optimizer), before)


def job(rank: int, options: Namespace) -> None:
    tpcore.init(backend="cpu_gloo", tp=2 if options.over == "tp" else 1)
    of_tp, dtype, rounds = options.over == "tp", options.dtype, options.rounds or SIZES[options.size][3]
    of_muon: dict[str, Any] = {"lr": LR, "ns_dtype": dtype}
    makes: dict[str, tuple[bool, Callable[[nn.Module], torch.optim.Optimizer]]] = {
        "torch, unsharded": (False, lambda m: Both(m, dtype)),
        "tpcore": (of_tp, lambda m: tpcore.Muon(m.named_parameters(), **of_muon)),
    }
    if of_tp:
        makes["tpcore, blocks"] = (True, lambda m: tpcore.Muon(m.named_parameters(), rule=blocks, **of_muon))
    else:
        makes["tpcore, Zero1"] = (False, lambda m: tpcore.Zero1(tpcore.Muon, m.named_parameters(), **of_muon))
    models = {name: model_of(options.size, sharded=sharded) for name, (sharded, _) in makes.items()}
    entries = [contestant(name, models[name], make(models[name])) for name, (_, make) in makes.items()]
    title = f"{options.over} 2, {options.size}, {str(dtype).removeprefix('torch.')}"
    if rank == 0:
        sys.stderr.write(f"{title}: {rounds + options.warm} rounds of {len(entries)} steps\n")
    result = race(title, entries, rounds, 1, options.warm)
    say(table(result, "torch, unsharded"))
    floor = dict(models["torch, unsharded"].named_parameters())
    for name, model in models.items():
        for key, p in model.named_parameters() if name != "tpcore, blocks" else ():
            mark = sharding(p)
            check_equal(name, key, p, floor[key] if mark is None else mark.part(floor[key].detach()), TOLERANCE[dtype])
    say("\nafter the race all that orthogonalize whole matrices hold equal weights\n")
    tpcore.shutdown()


def blocks(name: str, p: Tensor) -> str | None:
    return "blocks" if p.ndim == 2 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small", help="small takes a minute, large many")
    parser.add_argument("--over", nargs="+", choices=["tp", "dp"], default=["tp", "dp"])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--warm", type=int, default=1)
    options = Namespace(**vars(parser.parse_args()), dtype=dtype_here())
    for over in options.over:
        start(job, Namespace(**{**vars(options), "over": over}), 2)
    say(conditions(2))


if __name__ == "__main__":
    main()
