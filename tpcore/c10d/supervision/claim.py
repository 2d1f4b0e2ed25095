"""Each rank number of a job belongs to one process; jobs that got one address would mix, and are ended."""

from __future__ import annotations

import json
from dataclasses import astuple
from functools import partial

import torch.distributed as dist

from ... import settings
from ...errors import BackendError
from .host import Identity
from .rendezvous import own_client, place_of_server
from .status_store import StatusStore
from .verdict import Verdict

_TWICE = "tpcore/twice"


def monitor_of(token: str) -> str:
    """The part of the store with the status of the job whose rank 0 drew ``token``."""
    return f"tpcore monitor {token}"


def claim(store: dist.Store, rank: int, own: Identity, token: str, timeout: float) -> None:
    """Take the place of ``rank``. BackendError, here and on the job's ranks, if another process has it."""
    mine, key = json.dumps([astuple(own), token]), f"tpcore/rank/{rank}"
    holder = Identity(*json.loads(store.compare_set(key, "", mine))[0])
    if holder == own or (holder.neighbour_of(own) and holder.fate() is not None):
        store.set(key, mine)  # of an earlier start at this store
        return
    status = _status(store, timeout)
    if status is not None and status.ended(rank) is not None:
        store.set(key, mine)
        return
    place = place_of_server(store)
    where = "" if place is None else f" to {place[0]}:{place[1]}"
    text = (
        f"rank {rank} has come twice{where}, as {holder} and as {own}: two jobs have one "
        "address, or two processes one RANK. Give each job a MASTER_PORT of its own"
    )
    store.set(_TWICE, text)
    if status is not None:
        status.post(Verdict("lost", text))
    raise BackendError(text)


def twice(store: dist.Store) -> BackendError | None:
    """The error if a rank number of this job has come twice."""
    return BackendError(store.get(_TWICE).decode()) if store.check([_TWICE]) else None


def _status(store: dist.Store, timeout: float) -> StatusStore | None:
    """The status of the job whose rank 0 is at ``store``."""
    if not store.check(["tpcore/rank/0"]):
        return None
    prefix = monitor_of(json.loads(store.get("tpcore/rank/0"))[1])
    status = StatusStore(partial(own_client, store, prefix, timeout))
    status.open()
    return status


def job_ids(world: int) -> dict[str, str]:
    """What all ranks of one job have in common, as far as its launcher says."""
    known = [settings.RUN_ID] + ([] if settings.SLURM_HET.is_set else [settings.SLURM_JOB])
    return {"WORLD_SIZE": str(world)} | {v.name: v.text() for v in known if v.is_set}
