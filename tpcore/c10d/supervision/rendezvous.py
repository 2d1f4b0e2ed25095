"""The store of a job, and meetings of ranks there before they have groups. Errors name who does not come."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import settings
from ...errors import BackendError, CollectiveTimeoutError, PeerLostError

_HOST = "127.0.0.1"
_VARIABLES = (settings.RANK, settings.WORLD_SIZE, settings.MASTER_ADDR, settings.MASTER_PORT)

Lost = Callable[[Sequence[int]], BackendError | None]


class Rendezvous:
    """All ranks of a job at its store."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout: float) -> None:
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self.meeting = False  # for another thread of this rank

    def meet(
        self, purpose: str, text: str, lost: Lost = lambda missing: None, ranks: Sequence[int] | None = None
    ) -> list[str]:
        """The ``text`` of every rank of the job or of ``ranks``, in that order. Raises CollectiveTimeoutError, which
        names the missing ranks, or the error that ``lost`` returns for them."""
        keys = {r: f"{purpose}/{r}" for r in (range(self.world) if ranks is None else ranks)}
        self.meeting = True
        try:
            self.store.set(keys[self.rank], text)
            self._wait(purpose, keys, lost)
            return [self.store.get(k).decode() for k in keys.values()]
        except dist.DistNetworkError as e:
            raise PeerLostError(f"rank {self.rank}: the job's store is gone while ranks meet to {purpose}: {e}") from e
        finally:
            self.meeting = False

    def _wait(self, purpose: str, keys: Mapping[int, str], lost: Lost) -> None:
        # polls: the store's own wait prints warnings when it times out
        deadline, pause = time.monotonic() + self.timeout, 0.001
        while not self.store.check(list(keys.values())):
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if pause < 0.1:
                continue
            missing = [r for r, k in keys.items() if not self.store.check([k])]
            error = lost(missing)
            # the last may have come since, all have met, and one of them has gone on and failed
            if error is not None and not self.store.check(list(keys.values())):
                raise error
            if missing and time.monotonic() > deadline:
                who = ", ".join(map(str, missing))
                waited = f"rank {self.rank} waited {self.timeout:g} s to {purpose}"
                raise CollectiveTimeoutError(f"{waited}: rank {who} of {self.world} did not come")


def timed_out(error: RuntimeError) -> bool:
    """Whether ``error`` is a time-out of a store. That of torch's file store has no class of its own."""
    of_file_store = str(error).startswith(("Wait timeout", "Timeout waiting"))
    return of_file_store or isinstance(error, dist.DistStoreError)


def store_of_environment(timeout: float) -> tuple[dist.Store, int, int] | None:
    """(store, rank, world size) from the variables of ``C10dBackend.job`` or of torchrun; None in a process without a
    launcher."""
    if settings.STORE.is_set:
        # a file: no port has to be chosen, and torch looks up no host name, which can take seconds
        store: dist.Store = dist.FileStore(settings.STORE.get(), -1)
        store.set_timeout(timedelta(seconds=timeout))
        return store, settings.RANK.get(), settings.WORLD_SIZE.get()
    if not settings.RANK.is_set and not settings.WORLD_SIZE.is_set:
        return None
    if unset := [variable.name for variable in _VARIABLES if not variable.is_set]:
        present = {variable.name: variable.text() for variable in _VARIABLES if variable.is_set}
        raise BackendError(f"{present} is set, but not {', '.join(unset)}: torchrun sets all of them, or none must be")
    try:
        rank, world, port = (v.get() for v in (settings.RANK, settings.WORLD_SIZE, settings.MASTER_PORT))
    except ValueError as e:
        raise BackendError(str(e)) from None
    if rank >= world:
        raise BackendError(f"RANK={rank} is outside WORLD_SIZE={world}")
    if port == 0 and (world > 1 or settings.AGENT_STORE.get()):
        raise BackendError("MASTER_PORT=0 tells no rank where others are: torchrun --standalone, or name a free port")
    store = _tcp_store(settings.MASTER_ADDR.get(), port, rank, world, timeout)
    if settings.AGENT_STORE.get():
        store = _of_this_start(store, rank, world, timeout)
    return store, rank, world


def _of_this_start(store: dist.Store, rank: int, world: int, timeout: float) -> dist.Store:
    """The part of a launcher's store of the ranks that were started together, for it may be kept when ranks start
    again. Agents of several hosts count restarts apart, so rank 0 draws a name, and gives it to whoever asks with a
    new one."""
    name, deadline, pause = uuid.uuid4().hex, time.monotonic() + timeout, 0.001
    ask, answer = f"tpcore start/{rank}", f"tpcore start/{name}"
    if rank > 0:
        store.set(ask, name)
    missing, answered = set(range(1, world)) if rank == 0 else {0}, set[str]()
    while missing:
        if rank == 0:
            _answer(store, name, missing, answered)
        elif store.check([answer]):
            name = store.get(answer).decode()
            store.set(f"{name}/{rank}", "")
            break
        if missing and time.monotonic() > deadline:
            waited = f"rank {rank} waited {timeout:g} s to start"
            who = ", ".join(map(str, sorted(missing)))
            raise CollectiveTimeoutError(f"{waited}: rank {who} of {world} did not come")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return dist.PrefixStore(name, store)


def _answer(store: dist.Store, name: str, missing: set[int], answered: set[str]) -> None:
    """Give ``name`` to all that have asked, killed ranks among them; who took it is not ``missing`` any more."""
    for rank in sorted(missing):
        if store.check([f"{name}/{rank}"]):
            missing.discard(rank)
        elif store.check([f"tpcore start/{rank}"]):
            requester = store.get(f"tpcore start/{rank}").decode()
            if requester not in answered:
                store.set(f"tpcore start/{requester}", name)
                answered.add(requester)


def _tcp_store(host: str, port: int, rank: int, world: int, timeout: float) -> dist.Store:
    """The store of torch's env://, without its wait for all ranks: ``Rendezvous.meet`` can name them."""
    of_launcher = settings.AGENT_STORE.get()
    hosts, seconds = rank == 0 and not of_launcher, timedelta(seconds=timeout)
    try:
        return dist.TCPStore(host, port, world, hosts, seconds, wait_for_workers=False, multi_tenant=True)
    except (dist.DistNetworkError, dist.DistStoreError) as e:
        owner = "the launcher" if of_launcher else "rank 0"
        raise CollectiveTimeoutError(
            f"rank {rank} waited {timeout:g} s for {owner}, which hosts the store at {host}:{port}: {e}"
        ) from e


def address_towards(store: dist.Store, alone: bool) -> str:
    """The address at which other ranks reach this host. ``alone``: all ranks are on this host."""
    place = place_of_server(store)
    if alone and place is None:
        return _HOST
    host, port = place or (socket.gethostname(), 1)
    # sends no packet: the kernel returns the source address that it would use
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as s:
            s.connect(address)
            return str(s.getsockname()[0])
    return _HOST


def place_of_server(store: dist.Store) -> tuple[str, int] | None:
    """Host and port of a TCPStore; None for other stores."""
    store = _innermost(store)
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def folder_beside(store: dist.Store, name: str) -> Path | None:
    """The path of a folder next to the file of a FileStore; None for other stores."""
    store = _innermost(store)
    return Path(f"{store.path}.{name}") if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]


def own_client(store: dist.Store, prefix: str, timeout: float) -> dist.Store:
    """``store`` under ``prefix`` through its own connection: calls on one connection block each other."""
    store = _innermost(store)
    if isinstance(store, dist.TCPStore):
        seconds = timedelta(seconds=timeout)
        store = dist.TCPStore(store.host, store.port, timeout=seconds, wait_for_workers=False)
    elif isinstance(store, dist.FileStore):
        store = dist.FileStore(store.path, -1)  # type: ignore[attr-defined]  # not in torch's stub
    return dist.PrefixStore(prefix, store)


def _innermost(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def host_store() -> tuple[Any, dict[str, str]]:
    """The store, which exists as long as it is referenced, and the environment variables for the ranks."""
    # a listening socket of our own: TCPStore would listen on all interfaces, whatever its host is
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    place = {settings.MASTER_ADDR.name: _HOST, settings.MASTER_PORT.name: str(port)}
    return store, place | {settings.AGENT_STORE.name: "True"}
