"""A save that goes on while training does: ranks hear of each other through files, not collectives."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from typing import Any

from ..agree import together
from ..context import ParallelContext, current
from ..errors import CheckpointError
from .files import read_file
from .writing import Options, Save

_log = logging.getLogger(__name__)
_PATIENCE = 3600.0  # seconds that rank 0 waits for another's part after its own; a dead job is ended sooner
_POLL = 0.05
_under_way: dict[int, tuple[ParallelContext, _Background]] = {}  # by id of the context: threads have several


class _Background:
    """The thread of one save on one rank."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tpcore-save", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _said(self, rank: int) -> str:
        """Where a rank leaves what it has written, or why it has not."""
        return os.path.join(self._save.root, f"said-{rank}")

    def _run(self) -> None:
        save, began = self._save, time.monotonic()
        try:
            if save.ctx.rank == 0:
                _log.info("saving %s", save.target)
            try:
                self._say(save.write())
            except Exception as e:
                self._say(json.dumps({"error": str(e)}).encode())
                if save.ctx.rank:
                    raise
            if save.ctx.rank == 0:
                self._commit()
                _log.info("saved %s in %.1f s", save.target, time.monotonic() - began)
        except BaseException as e:  # noqa: BLE001  raised again where the main thread asks
            self.error = e
        finally:
            save.close()

    def _commit(self) -> None:
        """Once all ranks have written: also where one has failed, so that nobody writes any more."""
        heard = [self._hear(rank) for rank in range(self._save.ctx.mesh.size)]
        for rank, data in enumerate(heard):
            said = json.loads(data)
            if isinstance(said, dict):
                raise CheckpointError(f"rank {rank}: {said['error']}")
            os.unlink(self._said(rank))
        self._save.put_together(heard)

    def _say(self, data: bytes) -> None:
        path = self._said(self._save.ctx.rank)
        with open(f"{path}.new", "wb") as f:
            f.write(data)
        os.rename(f"{path}.new", path)

    def _hear(self, rank: int) -> bytes:
        path, until = self._said(rank), time.monotonic() + _PATIENCE
        while not os.path.exists(path):
            if time.monotonic() > until:
                raise CheckpointError(f"cannot save {self._save.target}: rank {rank} has written nothing")
            time.sleep(_POLL)
        return read_file(path)


def save_in_background(state: dict[Any, Any], save_dir: str | os.PathLike[str], options: Options) -> None:
    """Returns when ``state`` is copied to host memory. Collective; the one before must be finished."""
    save = Save(state, save_dir, options)
    with together(save.ctx):  # so that nobody waits for a part that is not being written yet
        _under_way[id(save.ctx)] = save.ctx, _Background(save)


def finish_save() -> None:
    """Wait for the save in the background, if there is one, and raise its error on every rank."""
    ctx = current()
    found = _under_way.pop(id(ctx), None)
    if found is None:
        return
    running = found[1]
    with together(ctx):
        running.join()
        if running.error is not None:
            raise CheckpointError(f"the save in the background failed: {running.error}") from running.error


@atexit.register
def _at_exit() -> None:
    for ctx, running in _under_way.values():
        running.join()
        if running.error is not None:
            print(f"tpcore: rank {ctx.rank}: the save in the background failed", file=sys.stderr)  # noqa: T201
            traceback.print_exception(running.error)
