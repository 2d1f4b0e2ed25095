"""The checks of the primitives fail a backend that drops, misgroups or misorders a collective."""

from __future__ import annotations

import pytest
import torch
from onreplicas import on_replicas
from test_xla_primitives import primitives

from tpcore.runtime.context import ParallelContext


def _mine(comm, x, dim):
    n = x.shape[dim] // comm.size  # by data: the program is one for all ranks
    return x.index_select(dim, comm.position * n + torch.arange(n).to(x.device))


def dropped_sum(comm, other) -> None:
    comm._reduced = lambda x, op: x.clone()


def maximum_for_sum(comm, other) -> None:
    reduced = comm._reduced
    comm._reduced = lambda x, op: reduced(x, "max")


def dropped_gather(comm, other) -> None:
    comm.all_gather = lambda x, dim: torch.cat([x] * comm.size, dim)


def gather_along_another_dim(comm, other) -> None:
    gather = type(comm).all_gather
    comm.all_gather = lambda x, dim: gather(comm, x.transpose(0, 1), 1 - dim if dim < 2 else dim)


def dropped_reduce_scatter(comm, other) -> None:
    comm.reduce_scatter = lambda x, dim: _mine(comm, x, dim)


def gather_without_sum(comm, other) -> None:
    comm.reduce_scatter = lambda x, dim: _mine(comm, comm.all_reduce(x, "max", False), dim)


def other_groups(comm, other) -> None:
    comm._groups = other._groups


def one_group_of_all(comm, other) -> None:
    comm._groups = [sorted(rank for ranks in comm._groups for rank in ranks)]


def groups_in_another_order(comm, other) -> None:
    comm._groups = [ranks[::-1] for ranks in comm._groups]


def broadcast_from_the_first(comm, other) -> None:
    broadcast = type(comm).broadcast
    comm.broadcast = lambda x, src: broadcast(comm, x, 0)


def dropped_exchange(comm, other) -> None:
    comm.all_to_all = lambda x, split, concat: torch.cat(x.chunk(comm.size, split), concat)


def permuted_backwards(comm, other) -> None:
    permute = type(comm).permute
    comm.permute = lambda x, to: permute(comm, x, tuple(range(comm.size)))


def nothing(comm, other) -> None:
    pass


MUTATIONS = [
    dropped_sum, maximum_for_sum, dropped_gather, gather_along_another_dim, dropped_reduce_scatter,
    gather_without_sum, other_groups, one_group_of_all, groups_in_another_order, broadcast_from_the_first,
    dropped_exchange, permuted_backwards,
]  # fmt: skip


def mutated(ctx: ParallelContext, mutate, axis: str) -> list[str]:
    """Names of the primitives that are wrong now."""
    comm = ctx.comm(axis)
    mutate(comm.transport, ctx.comm("dp" if axis == "tp" else "tp").transport)
    found = primitives(ctx, axis, torch.float32)
    return [name for name, (got, want) in found.items() if got.shape != want.shape or not torch.equal(got, want)]


@pytest.mark.parametrize("axis", ["tp", "dp"])
@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda m: m.__name__)
def test_a_wrong_collective_is_found(mutate, axis):
    if mutate is one_group_of_all:  # ranks of one group then get chunks for four: shapes that do not fit
        with pytest.raises(Exception):  # noqa: B017, PT011  whatever it runs into
            assert not any(on_replicas(4, 2, mutated, mutate, axis))
        return
    wrong = on_replicas(4, 2, mutated, mutate, axis)
    assert any(wrong), "no rank noticed"


def test_the_right_backend_has_no_findings():
    assert on_replicas(4, 2, mutated, nothing, "tp") == [[]] * 4
