"""The conformance kit's calls that are drawn at random: any call of any method equals its meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from ...comm.comm import Comm
from ...comm.transport import Pending
from ...errors import BackendError
from .chance import WAYS, Chance, DrawnCall, Placed, placed
from .collectives import METHODS, plain_argument
from .rank import RankCheck, Right, check, differs
from .samples import Numbers, kinds

_UNDER_WAY, _KEPT = (0, 1, 3, 12, 40), 12


class _Program:
    """Calls of this rank. What ``chance`` draws is alike on all ranks; how memory lies, and in which order this rank
    waits, is its ``own``."""

    def __init__(
        self, t: RankCheck, comms: Sequence[Comm], seed: int, name: str, loses: Sequence[str], most: int
    ) -> None:
        self.t, self.comms, self.most, self.seed = t, comms, most, seed
        self._chance = Chance(f"{seed} {name}", comms, t.ctx.backend.capabilities, most)
        self._own = Random(f"{seed} {name} {t.ctx.rank}")
        self._numbers = Numbers(seed, loses, most + max(comm.size for comm in comms))
        self._under_way: list[Callable[[], None]] = []
        t.remedy = f"\n  draw it again with --kit-seed={seed}"

    def run(self, methods: Sequence[str], one_in: int) -> None:
        """One in ``one_in`` points of the product of methods, switches, dtypes and sizes, in any order."""
        points = [p for method in methods for p in self._chance.points(method)]
        self._chance.random.shuffle(points)
        with ThreadPoolExecutor(1) as self._thread:
            for number, point in enumerate(points[: -(-len(points) // one_in)]):
                call = self._chance.call(number, *point)
                sent: Placed | None = self._sent(call)
                again = ""
                while sent is not None:
                    self._make(call, sent, f"call {number}{again} of seed {self.seed}")
                    (call, sent), again = self._like(call, sent), again + " again"
            self._wait(0)

    def _sent(self, call: DrawnCall) -> Placed:
        sent = placed(self._own, self._own.choice(WAYS), call.shape, call.dtype, call.same, self.t.ctx.device)
        differentiable = call.dtype.is_floating_point or call.dtype.is_complex
        if "requires_grad" in sent.how and differentiable and not call.donated:
            sent.x.requires_grad_()
        return sent

    def _like(self, call: DrawnCall, sent: Placed) -> tuple[DrawnCall, Placed | None]:
        """Often a next call like it: with the same tensor, the same memory turned, in other memory or another mode,
        of another dtype or as a line. What a backend keeps of the first must not show in the second."""
        how = self._chance.random.choice(("", "", "", "", "tensor", "turned", "memory", "mode", "dtype", "line"))
        if how == "tensor" and not call.donated:
            return call, sent
        if how == "turned" and not call.donated and not call.primitive.divides:
            order = range(len(call.shape))[::-1]
            other = sent._replace(view=lambda memory: sent.view(memory).permute(list(order)), how=f"{sent.how}, turned")
            call = call._replace(shape=call.shape[::-1], same=None if call.same is None else order[call.same])
            return call, other._replace(x=other.view(sent.memory))
        if how == "mode":
            call = call._replace(inference=not call.inference)
        if how == "dtype":
            dtypes = sorted(
                {p[2] for p in self._chance.points(call.method) if p[1].items() <= call.options.items()}, key=str
            )
            dtype = self._chance.random.choice(dtypes)
            call = call._replace(dtype=dtype, kind=self._chance.random.choice(kinds(dtype, call.reduced)))
        if how == "line" and not {"dim", "split_dim"} & call.primitive.arguments.keys():
            call = call._replace(shape=(math.prod(call.shape),), same=None)
        return call, self._sent(call) if how else None

    # -- a call and its result ------------------------------------------------------------------------------
    def _make(self, call: DrawnCall, sent: Placed, name: str) -> None:
        what = f"{call}, {sent.how}), {name},"
        every, right = self._right(call, f"{call.method}, {name}")
        only = sent.x.detach()
        if call.same is not None and call.shape[call.same] and not only.stride(call.same):  # one memory for all of them
            only, every = only.narrow(call.same, 0, 1), every.narrow(call.same, 0, 1)
        only.copy_(every)
        before = sent.memory.clone()
        with torch.inference_mode(call.inference):
            made = self._named(what, lambda: getattr(call.comm, call.method)(sent.x, **call.options))
        if not call.donated:
            self.t.expect(not sent.unlike(before, False), f"the input has changed: {what}")
        if not call.method.startswith("start_"):
            self._judge(call, sent, before, made, right, what)
            return
        if not call.donated:  # the caller may change it from now on
            sent.memory.fill_(1)
            before.fill_(1)
        self._under_way.append(lambda: self._finish(call, sent, before, made, right, what))
        self._wait(self._chance.random.choice(_UNDER_WAY))

    def _finish(self, call: DrawnCall, sent: Placed, before: Tensor, wait: Pending, right: Right, what: str) -> None:
        how = self._own.choice(("once", "twice", "in another thread"))
        got = self._named(what, self._thread.submit(wait).result if how == "in another thread" else wait)
        if how != "once":
            self.t.expect(not differs(wait(), got), f"a second wait returns something else: {what}")
        self._judge(call, sent, before, got, right, f"{what} waited for {how},")

    def _wait(self, most: int) -> None:
        """Until no more than ``most`` are under way; for any of them, which differs by rank."""
        while len(self._under_way) > most:
            self._under_way.pop(self._own.randrange(len(self._under_way)))()

    def _right(self, call: DrawnCall, name: str) -> tuple[Tensor, Right]:
        """What this rank sends, and what it has to receive."""
        comm, place, ndim = call.comm, self._chance.random.randrange(1 << 20), len(call.shape)
        members = comm.group.members(self.t.ctx.rank)
        me = members.index(self.t.ctx.rank)
        small = tuple(1 if d == call.same and n else n for d, n in enumerate(call.shape))
        of = partial(self._numbers.of, call.kind, small, call.dtype, call.reduced, place, size=comm.size)
        # by the rank as well as by its position: each group has numbers of its own
        every = [of(position=p, rank=rank).expand(call.shape) for p, rank in enumerate(members)]
        arguments = [plain_argument(name, call.options[name], ndim) for name in call.primitive.arguments]
        want, allowed = call.primitive.meaning(every, me, *arguments).contiguous(), None
        if call.kind == "mixed" and comm.size > 2:  # one rounding for each addend; two addends have one right sum
            size = call.primitive.meaning([x.double().abs() for x in every], me, *arguments)
            allowed = size * (comm.size * torch.finfo(call.dtype).eps)
        return every[me], Right(want, bool(call.reduced), allowed, name if call.method.endswith("all_reduce") else "")

    def _judge(self, call: DrawnCall, sent: Placed, before: Tensor, got: Tensor, right: Right, what: str) -> None:
        self.t.judge(what, got, right, call.comm, None if call.donated else sent.memory)
        # what is under way may be finished by a call beside it, in that call's mode
        ordinary = call.inference or call.method.startswith("start_") or not got.is_inference()
        self.t.expect(ordinary, f"the result is an inference tensor: {what}")
        with torch.inference_mode():
            changed = sent.unlike(before, call.donated)
        self.t.expect(not changed, f"the memory of the input, or about it, has changed: {what}")
        self.t.let_go(_KEPT)

    def _named(self, what: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except BackendError:  # its message names ranks, and its type tells whether another's failure is the cause
            raise
        except Exception as e:
            raise RuntimeError(f"{what} on rank {self.t.ctx.rank} raised {type(e).__name__}: {e}") from e


@check
def any_call(t: RankCheck, method: str, seed: int, one_in: int, most: int, loses: Sequence[str]) -> None:
    """A failure is in some calls of this method: their arguments, dtype, size, numbers or memory, or what is under way
    beside them."""
    if t.comm.eager:
        _Program(t, [t.comm], seed, method, loses, most).run([method], one_in)


@check
def under_way(t: RankCheck, seed: int, one_in: int, most: int, loses: Sequence[str]) -> None:
    """A failure is in what calls of different methods, or over different groups, share."""
    axes, halves = tuple(t.ctx.mesh.axes), [2] if t.ctx.mesh.size % 2 == 0 else []
    tried = [*((a,) for a in axes), axes[:2], axes[:: max(1, len(axes) - 1)], axes, axes[::-1]]
    comms = [*(t.ctx.comm(*names) for names in tried), *(t.ctx.comm(*axes, within=half) for half in halves)]
    comms = list(dict.fromkeys(comm for comm in comms if comm.size > 1))
    if t.ctx.world.eager:
        _Program(t, comms, seed, "all", loses, min(most, 1 << 13)).run(METHODS, 8 * one_in)


for _check in (any_call, under_way):
    vars(_check)["timeouts"] = 5  # thousands of calls, on a machine with other work
