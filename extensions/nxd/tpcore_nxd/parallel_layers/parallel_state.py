"""NeuronX Distributed's getters for ranks, sizes and groups, answered from the current context.

``tpcore.Mesh`` orders the ranks: those of a tp group are contiguous, those of a dp group ``tp`` apart. Before
``initialize_model_parallel`` (or ``tpcore.init``) every getter raises the RuntimeError of ``tpcore.current``, which
names the remedy. An axis that the mesh lacks has size 1.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from tpcore import settings
from tpcore.comm.comm import Comm
from tpcore.errors import BackendError
from tpcore.layout.mesh import BATCH, DATA
from tpcore.runtime.consensus import gather_bytes
from tpcore.runtime.context import current, is_initialized
from tpcore.runtime.init import init, shutdown

from ..utils import get_rank_info_str

__all__ = ["destroy_model_parallel", "gather_python_object", "get_rank_info_str", "get_world_group"]
__all__ += ["initialize_model_parallel", "is_global_rank_zero", "model_parallel_is_initialized", "rmsg"]
__all__ += ["get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_parallel_size"]
__all__ += ["get_tensor_model_parallel_replica_groups", "get_tensor_model_parallel_size"]
__all__ += ["get_tensor_model_parallel_src_rank", "get_tensor_model_parallel_world_size"]
__all__ += ["get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_replica_groups"]
__all__ += ["get_data_parallel_size", "get_data_parallel_src_rank", "get_data_parallel_world_size"]
__all__ += ["get_pipeline_model_parallel_group", "get_pipeline_model_parallel_next_rank"]
__all__ += ["get_pipeline_model_parallel_prev_rank", "get_pipeline_model_parallel_rank"]
__all__ += ["get_pipeline_model_parallel_replica_groups", "get_pipeline_model_parallel_size"]
__all__ += ["create_pg_with_ranks", "get_next_rank_group", "get_prev_rank_group"]
__all__ += ["get_context_model_parallel_group", "get_context_model_parallel_rank", "get_context_model_parallel_size"]
__all__ += ["get_context_model_parallel_replica_groups", "get_context_model_parallel_src_tgt_pairs"]
__all__ += ["get_expert_model_parallel_group", "get_expert_model_parallel_rank", "get_expert_model_parallel_size"]
__all__ += ["get_expert_data_parallel_group", "get_expert_model_parallel_replica_groups"]
__all__ += ["get_expert_data_parallel_rank", "get_expert_data_parallel_replica_groups"]
__all__ += ["get_expert_data_parallel_size", "get_zero1_sharding_groups"]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    skip_collective_init: bool = False,
    lnc_size: int = 1,
) -> None:
    """``tpcore.init`` with these sizes, then unless ``skip_collective_init`` a collective over the world: it reveals an
    unreachable rank here, and lets devices open all connections at once.

    ``TPCORE_BACKEND`` chooses the backend. A process group that the script has made already is used. Raises ValueError
    if their product does not divide the world or ``lnc_size`` is not 1, RuntimeError if initialized already.
    """
    if lnc_size != 1:
        call = f"initialize_model_parallel: lnc_size={lnc_size!r}"
        raise ValueError(f"{call} is not supported, only 1: tp ranks are contiguous on every device")
    tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
    ctx = init(tp=tp, pp=pp, ep=expert_model_parallel_size, cp=context_parallel_size)
    if not skip_collective_init:
        counted = int(ctx.world.all_reduce(torch.ones((1,), dtype=torch.int64).to(ctx.device)))
        if counted != ctx.mesh.size:
            shutdown()
            raise BackendError(
                f"the first all-reduce over {ctx.mesh.size} ranks counted {counted}: "
                f"{type(ctx.backend).__name__} does not reach every rank"
            )


def model_parallel_is_initialized() -> bool:
    return is_initialized()


def destroy_model_parallel() -> None:
    """``tpcore.shutdown()``; does nothing before initialization. The script's own process group stays."""
    if is_initialized():
        shutdown()


def _comm(*axes: str) -> Comm:
    ctx = current()
    return ctx.comm(*ctx.mesh.present(axes))  # without axes: every rank is a group


def _size(*axes: str) -> int:
    return _comm(*axes).size


def _rank(*axes: str) -> int:
    return current().index(_comm(*axes))


def _replica_groups(*axes: str) -> list[list[int]]:
    mesh = current().mesh
    return mesh.group(*mesh.present(axes)).as_list()


def _group(axes: tuple[str, ...], as_list: bool = False) -> Any:
    """This rank's group as the backend's own object (on cpu_gloo a ``torch.distributed`` group, which
    DistributedDataParallel takes); ``as_list``: the ranks of *all* groups, ``[[0, 1], [2, 3]]``."""
    return _replica_groups(*axes) if as_list else _comm(*axes).process_group


def _src_rank(*axes: str) -> int:
    """Global rank of the first member of this rank's group: the ``src`` of broadcasts over it."""
    return _comm(*axes).group.members(current().rank)[0]


def _stage(step: int) -> int:
    """Global rank of a neighbouring stage; the first follows the last."""
    stages = _comm("pp").group.members(current().rank)
    return stages[(stages.index(current().rank) + step) % len(stages)]


def get_world_group(as_list: bool = False) -> Any:
    """The group of all ranks as the backend's own object; ``as_list``: ``[[0, 1, ...]]``."""
    ctx = current()
    return ctx.mesh.world().as_list() if as_list else ctx.world.process_group


def is_global_rank_zero() -> bool:
    return current().rank == 0


get_tensor_model_parallel_group = partial(_group, ("tp",))
get_tensor_model_parallel_replica_groups = partial(_replica_groups, "tp")
get_tensor_model_parallel_size = partial(_size, "tp")
get_tensor_model_parallel_rank = partial(_rank, "tp")
get_tensor_model_parallel_src_rank = partial(_src_rank, "tp")
# names that published samples use for the same getters
get_tensor_parallel_size = get_tensor_model_parallel_size
get_tensor_model_parallel_world_size = get_tensor_model_parallel_size

get_data_parallel_group = partial(_group, BATCH)
get_data_parallel_replica_groups = partial(_replica_groups, *BATCH)
get_data_parallel_size = partial(_size, *BATCH)
get_data_parallel_rank = partial(_rank, *BATCH)
get_data_parallel_src_rank = partial(_src_rank, *BATCH)
get_data_parallel_world_size = get_data_parallel_size

get_pipeline_model_parallel_group = partial(_group, ("pp",))
get_pipeline_model_parallel_replica_groups = partial(_replica_groups, "pp")
get_pipeline_model_parallel_size = partial(_size, "pp")
get_pipeline_model_parallel_rank = partial(_rank, "pp")
get_pipeline_model_parallel_next_rank = partial(_stage, 1)
get_pipeline_model_parallel_prev_rank = partial(_stage, -1)

# scripts query these axes even if they do not use them
get_context_model_parallel_group = partial(_group, ("cp",))
get_context_model_parallel_replica_groups = partial(_replica_groups, "cp")
get_context_model_parallel_size = partial(_size, "cp")
get_context_model_parallel_rank = partial(_rank, "cp")


def get_context_model_parallel_src_tgt_pairs() -> list[list[int]]:
    """From whom to whom a ring over context parallelism sends: from each rank to the next one of its group."""
    groups = _replica_groups("cp")
    return sorted([rank, ranks[(i + 1) % len(ranks)]] for ranks in groups for i, rank in enumerate(ranks))


get_expert_model_parallel_group = partial(_group, ("ep",))
get_expert_model_parallel_replica_groups = partial(_replica_groups, "ep")
get_expert_model_parallel_size = partial(_size, "ep")
get_expert_model_parallel_rank = partial(_rank, "ep")
# of the ranks that have the same experts and other examples
get_expert_data_parallel_group = partial(_group, ("dp",))
get_expert_data_parallel_replica_groups = partial(_replica_groups, "dp")
get_expert_data_parallel_size = partial(_size, "dp")
get_expert_data_parallel_rank = partial(_rank, "dp")

get_zero1_sharding_groups = partial(_replica_groups, *DATA)


def rmsg(msg: str) -> str:
    """``msg`` with this rank's coordinates in front, for logs; before initialization each of them is -1."""
    if is_initialized():
        rank = current().rank
        where = {axis: current().mesh.coords(rank).get(axis, 0) for axis in ("pp", "tp", "dp", "cp")}
    else:
        rank = settings.RANK.get()
        where = dict.fromkeys(("pp", "tp", "dp", "cp"), -1)
    return f"[{'_'.join([f'rank_{rank}', *(f'{axis}{at}' for axis, at in where.items())])}] {msg}"


def gather_python_object(obj: Any, group: Any = None) -> list[Any]:
    """The ``obj``, what pickle takes, of every rank of the group on its first rank, in group order; ``[]`` on the
    others. ``group``: as in ``mappings``. Collective over it; only bytes of this job's own ranks are unpickled."""
    ctx = current()
    comm = ctx.comm_for(group)
    pickled = gather_bytes(pickle.dumps(obj), comm)
    first = comm.group.members(ctx.rank)[0] == ctx.rank
    return [pickle.loads(data) for data in pickled] if first else []


# -- groups of some pipeline stages: those that share a parameter, and neighbours ---------------------------------
def create_pg_with_ranks(ranks: Sequence[int]) -> Any:
    """This pipeline's group of the stages ``ranks`` as the backend's own object; None on a rank of another
    stage. Collective over the world; the second call for the same stages returns the same object."""
    ctx, pipelines = current(), _replica_groups("pp")
    count = len(pipelines[0])
    if not set(ranks) <= set(range(count)):
        raise ValueError(f"create_pg_with_ranks({list(ranks)}): there are {count} pipeline stages, counted from 0")
    shared = [tuple(stages[i] for i in ranks) for stages in pipelines]
    others = [tuple(r for r in stages if r not in row) for stages, row in zip(pipelines, shared, strict=True)]
    comm = ctx.grouped(f"stages {list(ranks)}", (*shared, *filter(None, others)))
    return comm.process_group if any(ctx.rank in row for row in shared) else None


def _neighbours(step: int, as_list: bool = False) -> Any:
    """This stage and the next (``step`` 0) or the one before (1) as the backend's own object; ``as_list``: all such
    pairs. The first call is collective over the world. ValueError for an odd number of stages."""
    ctx, pipelines = current(), _replica_groups("pp")
    count = len(pipelines[0])
    if count % 2:
        raise ValueError(f"{count} pipeline stages make no pairs: there is no group of neighbours")
    # two partitions: pairs that begin at even stages, and those that begin at odd ones
    halves = [[[row[i], row[(i + 1) % count]] for row in pipelines for i in range(at, count, 2)] for at in (0, 1)]
    parity = (ctx.coord("pp") + step) % 2
    if as_list:
        return halves[parity]
    # both on every rank, for making a group is collective over the world
    sorted_pairs = [tuple(tuple(sorted(pair)) for pair in pairs) for pairs in halves]
    comms = [ctx.grouped(f"pairs from stage {at}", pairs) for at, pairs in enumerate(sorted_pairs)]
    return comms[parity].process_group


get_next_rank_group = partial(_neighbours, 0)
get_prev_rank_group = partial(_neighbours, 1)
