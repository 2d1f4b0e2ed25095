"""The mean of gradients over data parallel, in buckets that one collective moves, also beside backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.comm import Comm
from ..comm.transport import CPU, Pending
from ..private import recorded
from ..runtime.gradients import check_sums
from .parameters import Parameters, average_experts, data_comm, unique_parameters

T = TypeVar("T")


def buckets(items: Iterable[T], kind: Callable[[T], Hashable], nbytes: Callable[[T], int], most: int) -> list[list[T]]:
    """Lists of items of one kind, in order, of up to ``most`` bytes each; a larger item is alone. The lists are in the
    order of their last items."""
    ordered: dict[int, list[T]] = {}  # by ids, which stay theirs: it keeps the lists alive
    filling: dict[Hashable, tuple[list[T], int]] = {}
    for item in items:
        bucket, size = filling.get(kind(item), ([], 0))
        if bucket and size + nbytes(item) > most:
            bucket, size = [], 0
        bucket.append(item)
        filling[kind(item)] = bucket, size + nbytes(item)
        ordered.pop(id(bucket), None)
        ordered[id(bucket)] = bucket
    return list(ordered.values())


GradientOf = Callable[[Tensor], Tensor | None]


class Bucket:
    """Gradients that one collective reduces. ``begin`` starts it with the present ones, and zeros for missing ones;
    ``put`` takes its result."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradient_of: GradientOf,
        begin: Callable[[], Pending],
        put: Callable[[Tensor], None],
    ) -> None:
        self.parameters, self._gradient_of, self._begin, self._put = parameters, gradient_of, begin, put

    def start(self) -> None:
        with torch.no_grad():
            self.wait = self._begin()
        # after the start, which makes sparse gradients dense
        self._sent = [(g, g._version if g is not None else 0) for g in map(self._gradient_of, self.parameters)]

    def changed(self) -> bool:
        """Whether a gradient is another one than at the start: accumulated, scaled, dropped, replaced."""
        now = map(self._gradient_of, self.parameters)
        return any(
            g is not sent or (g is not None and g._version != version)
            for g, (sent, version) in zip(now, self._sent, strict=True)
        )

    def finish(self, again: bool) -> None:
        """Wait, and put the result. ``again``: of the present gradients, since a rank's have changed. Collective."""
        total = self.wait()
        self._put(self._begin()() if again else total)


class Overlap:
    """The buckets of one optimizer that are under way, until its step takes them. They start in one order on all ranks.
    The step compares each gradient with what was sent, so that a start that was too early changes no number. A block
    learns from the last one how often backward accumulates a gradient: never for a parameter that is not used."""

    def __init__(self) -> None:
        self._due: dict[Tensor, int] = {}
        self._under_way: list[Bucket] = []

    @contextmanager
    def block(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Start ``buckets`` while backward runs in the block, the others at its end."""
        self.drop()
        waiting, arrivals, lock = [*reversed(buckets)], Counter[Tensor](), Lock()

        def arrive(p: Tensor) -> None:
            with lock:  # backward has a thread for each device
                arrivals[p] += 1
                while waiting and all(arrivals[q] >= self._due.get(q, 1 << 62) for q in waiting[-1].parameters):
                    self._start(waiting.pop())

        with ExitStack() as hooks:
            for p in {p: None for bucket in buckets for p in bucket.parameters}:
                hooks.callback(p.register_post_accumulate_grad_hook(arrive).remove)
            yield
        while waiting:
            self._start(waiting.pop())
        self._due = {p: arrivals[p] for bucket in buckets for p in bucket.parameters}

    def _start(self, bucket: Bucket) -> None:
        bucket.start()
        self._under_way.append(bucket)

    def take(self) -> list[Bucket]:
        """The buckets under way, which the caller waits for."""
        under_way, self._under_way = self._under_way, []
        return under_way

    def drop(self) -> None:
        """Wait for the buckets under way; use none."""
        for bucket in self.take():
            bucket.wait()


def overlap_of(optimizer: torch.optim.Optimizer) -> Overlap:
    """An attribute of ``optimizer``, which its state does not include."""
    overlap: Overlap = vars(optimizer).setdefault("tpcore_overlap", Overlap())
    return overlap


BUCKET = 25 * 2**20
"""Bytes of gradients in one all-reduce: DDP's default, enough to hide latency."""


def present_anywhere(has: Sequence[bool], dp: Comm, device: torch.device) -> list[bool]:
    """For each gradient, whether any dp rank has it: not every rank's batch uses every parameter."""
    # a lazy backend runs one program on all ranks, so they cannot differ
    if not has or dp.size == 1 or not dp.eager:
        return list(has)
    anywhere = dp.all_reduce(torch.tensor(has, dtype=torch.int64).to(device, non_blocking=True), "max")
    return list(has) if recorded(anywhere) else [bool(n) for n in anywhere.tolist()]


@torch.no_grad()
def reduce_gradients(parameters: Parameters) -> None:
    """Replace every gradient by its mean over the data-parallel group, in buckets. Collective over dp, ep and cp.

    cp ranks count like dp ranks: each has other tokens and the loss of the whole batch. Backward takes the mean of an
    expert's gradient over ep. The mean of a mean is itself: a second call, or one in each step of an accumulation,
    changes no sum.

    A parameter that has no gradient on any dp rank keeps none. Raises ValueError for parameters of another
    context and for parameters that torch's own parallelism has cut.
    """
    reduce_beside(parameters, ())


def reduce_beside(parameters: Parameters, under_way: Sequence[Bucket]) -> None:
    """``reduce_gradients``, of which the buckets ``under_way`` are started."""
    by_comm: dict[Comm, tuple[list[Tensor], list[Bucket]]] = {}
    unique = unique_parameters(parameters)
    check_sums(unique)
    average_experts(unique)
    for p in unique:
        if p.requires_grad:
            by_comm.setdefault(data_comm(p), ([], []))[0].append(p)
    for bucket in under_way:
        by_comm.setdefault(data_comm(bucket.parameters[0]), ([], []))[1].append(bucket)
    # in the same order on all ranks
    for comm in sorted((comm for comm in by_comm if comm.size > 1), key=lambda comm: comm.group.axes):
        _average(*by_comm[comm], comm)


def _average(parameters: list[Tensor], under_way: list[Bucket], dp: Comm) -> None:
    """Replace the gradients by their means over ``dp``."""
    has = [*(p.grad is not None for p in parameters), *(bucket.changed() for bucket in under_way)]
    anywhere = present_anywhere(has, dp, parameters[0].device if parameters else CPU)
    for p, somewhere in zip(parameters, anywhere, strict=False):
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)  # another rank has one
    for bucket, again in zip(under_way, anywhere[len(parameters) :], strict=True):
        bucket.finish(again)
    done = {p for bucket in under_way for p in bucket.parameters}
    late = [p for p in reversed(parameters) if p.grad is not None and p not in done]
    for params in buckets(late, lambda p: dense(p).dtype, lambda p: dense(p).nbytes, BUCKET):
        _put(params, dp.all_reduce(_flat(params, dp.size), donate=True))


def dense(p: Tensor) -> Tensor:
    """The gradient of ``p``, or zeros. The ranks' sparse gradients have different rows."""
    if p.grad is not None and p.grad.is_sparse:
        p.grad = p.grad.to_dense()
    return torch.zeros_like(p) if p.grad is None else p.grad


def _flat(parameters: Sequence[Tensor], ranks: int) -> Tensor:
    return torch.cat([dense(p).reshape(-1) for p in parameters]).div_(ranks)


def _put(parameters: Sequence[Tensor], total: Tensor) -> None:
    for p, mean in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
        if p.grad is not None:
            p.grad.copy_(mean.view_as(p.grad))


def buckets_of(parameters: Sequence[Tensor]) -> list[Bucket]:
    """The buckets of parameters whose gradients are summed over ranks, in the order in which backward ends them."""
    average_experts(parameters)
    last_first = [p for p in reversed(parameters) if p.requires_grad and data_comm(p).size > 1]

    def kind(p: Tensor) -> tuple[Comm, torch.dtype]:
        return data_comm(p), p.dtype

    def bucket(params: Sequence[Tensor]) -> Bucket:
        comm = data_comm(params[0])  # backward may run in a thread that has no context

        def start() -> Pending:
            return comm.start_all_reduce(_flat(params, comm.size), donate=True)

        return Bucket(params, lambda p: p.grad, start, partial(_put, params))

    return [bucket(params) for params in buckets(last_first, kind, lambda p: p.nbytes, BUCKET)]
