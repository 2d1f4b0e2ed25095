"""Saves in the background of training. Ranks report to rank 0 through files instead of collectives."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from ...errors import CheckpointError
from ...log import log
from ...runtime.consensus import together
from ...runtime.context import ParallelContext, current
from ..storage.files import read_file
from .save import Options, Save

_log = log.getChild("checkpoint")
_PATIENCE = 600.0  # seconds without a new byte from a rank, after which rank 0 gives up on it
_PATIENCE_AT_EXIT = 120.0  # shorter, because only the save keeps the program from ending
_POLL = 0.05
_under_way: dict[int, tuple[ParallelContext, _Background]] = {}  # by id of the context: threads have several


class _Background:
    """The thread of one save on one rank. It writes after ``begin``."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self.patience = _PATIENCE
        self.error: CheckpointError | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tpcore-save", daemon=True)
        self._thread.start()
        self.begin, self.join = self._begun.set, self._thread.join

    def _report_path(self, rank: int) -> str:
        return os.path.join(self._save.root, f"report-{rank}")

    def _run(self) -> None:
        self._begun.wait()
        try:
            (self._follow if self._save.ctx.rank else self._lead)()
        except BaseException as e:  # noqa: BLE001  wait raises it in the main thread
            self.error = CheckpointError(f"the save in the background failed: {e}")
            self.error.__cause__ = e
        finally:
            self._save.close()

    def _lead(self) -> None:
        """On rank 0: write its part, wait for all reports, complete the checkpoint."""
        save, began = self._save, time.monotonic()
        _log.info("saving %s", save.target)
        try:
            written = save.write()
        finally:  # an error leaves here when no rank writes any more
            others = [self._wait_for_report(rank) for rank in range(1, save.ctx.mesh.size)]
        for rank, data in enumerate(others, 1):
            try:
                report = json.loads(data)
            except ValueError:
                report = {"error": "it could write neither its part nor its error"}
            if isinstance(report, dict):
                raise CheckpointError(f"rank {rank}: {report['error']}")
            os.unlink(self._report_path(rank))
        save.put_together([written, *others])
        _log.info("saved %s in %.1f s", save.target, time.monotonic() - began)

    def _follow(self) -> None:
        try:
            self._send(self._save.write())
        except Exception as e:
            with suppress(OSError):
                self._send(json.dumps({"error": str(e)}).encode())
            raise

    def _send(self, data: bytes) -> None:
        path = self._report_path(self._save.ctx.rank)
        try:
            with open(f"{path}.new", "wb") as f:
                f.write(data)
        finally:  # a full disk still has room for a rename, and a truncated report is invalid JSON
            os.rename(f"{path}.new", path)

    def _wait_for_report(self, rank: int) -> bytes:
        path, seen, since = self._report_path(rank), -1, time.monotonic()
        while not os.path.exists(path):
            written = _bytes_in(os.path.join(self._save.root, self._save.name_of(rank)))
            if written != seen:
                seen, since = written, time.monotonic()
            how = self._save.ctx.backend.gone(rank)
            if how is not None and not os.path.exists(path):
                raise CheckpointError(f"cannot save {self._save.target}: rank {rank} {how} before it had written")
            if written == seen and time.monotonic() > since + self.patience:
                raise CheckpointError(
                    f"cannot save {self._save.target}: rank {rank} has written {written} bytes, "
                    f"and nothing for {self.patience:.0f} s"
                )
            time.sleep(_POLL)
        return read_file(path)


def _bytes_in(folder: str) -> int:
    with suppress(FileNotFoundError):
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    return 0


def save_in_background(state: dict[Any, Any], path: str | os.PathLike[str], options: Options) -> None:
    """Start a save, and return when ``state`` is copied to host memory. Collective. The previous one must be over."""
    save = Save(state, path, options)
    running = None
    try:
        with together(save.ctx):  # so that no rank waits for a part whose save has not started
            running = _Background(save)
            _under_way[id(save.ctx)] = save.ctx, running
    finally:
        # not before the collective: with few cores, its messages would wait for the writing threads
        if running is not None:
            running.begin()


def wait() -> None:
    """Wait until the save in the background, if any, is complete. Raises its error on every rank. A collective call."""
    ctx = current()
    entry = _under_way.pop(id(ctx), None)
    if entry is None:
        return
    running = entry[1]
    with together(ctx):
        pass  # all ranks have started their save: threads that take turns could wait for a later one
    with together(ctx):
        running.join()
        if running.error is not None:
            raise running.error


@atexit.register
def _at_exit() -> None:
    failed = False
    for _, running in _under_way.values():
        running.patience = _PATIENCE_AT_EXIT
        running.join()
        if running.error is not None:
            failed = True
            sys.excepthook(CheckpointError, running.error, None)  # it ends the program as an error of the script would
    if failed:
        # an error in an exit handler would not change the exit status, which the caller must see
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
