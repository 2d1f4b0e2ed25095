"""A traced model in use: called like the original module, and run in its own processes."""

from __future__ import annotations

import uuid
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Condition
from typing import Any, NoReturn

from torch import Tensor, nn

from ...checkpoint.storage.publish import OwnedDirectory
from ...checkpoint.storage.tensorfile import write_tensors
from ...checkpoint.write.snapshot import StateTensor
from ..artifact import TraceManifest, weights_file
from ..inputs import put_together, ranges
from .workers import Workers


class Turn:
    """A lock as a context manager, first come, first served. threading.Lock does not guarantee an order."""

    def __init__(self) -> None:
        self._changed, self._waiting = Condition(), deque[object]()

    def __enter__(self) -> None:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket)
            except BaseException:
                self._waiting.remove(ticket)
                self._changed.notify_all()
                raise

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._waiting.popleft()
            self._changed.notify_all()


class TensorParallelModel(nn.Module):
    """The traced model that ``parallel_model_trace`` and ``parallel_model_load`` return.

    It is called like the original model and returns the same structure, of tensors on the CPU without gradients; a
    dict has attribute access if the original's has. The ranks are processes of this object. They end with
    ``close()``, with a with block, with the program and with the object. Calls from several threads are served in
    order of arrival. ``timeout``: seconds that a call may take, or None. ``restart``: if processes were lost, start
    them again in the next call. Otherwise every later call raises the error that lost them."""

    def __init__(
        self,
        folder: Path,
        manifest: TraceManifest,
        *,
        timeout: float | None = None,
        restart: bool = False,
        owned: TemporaryDirectory[str] | None = None,
    ) -> None:
        super().__init__()
        self.folder, self.manifest, self.timeout, self.restart = folder, manifest, timeout, restart
        self._workers = Workers(folder, manifest)
        self._turn = Turn()
        self._uses_of_state = 0
        self._owned = [] if owned is None else [owned]  # directories to remove together with this model
        self._replaced: TemporaryDirectory[str] | None = None
        self._end = weakref.finalize(self, _end, self._workers, self._owned)
        self.eval()

    @property
    def tp_degree(self) -> int:
        return self.manifest.tp

    @property
    def rank_seconds(self) -> list[float]:
        """Seconds of each rank's forward in the last call."""
        return list(self._workers.seconds)

    def start(self) -> TensorParallelModel:
        """Start the processes now instead of in the first call. Returns this model."""
        with self._turn:
            self._running()
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call_with_state(None, *args, **kwargs)

    def begin(self) -> int:
        """Begin another use of the state that the ranks keep; its number. All earlier uses are over."""
        with self._turn:
            self._running()
            self._uses_of_state += 1
            return self._uses_of_state

    def call_with_state(self, use: int | None, /, *args: Any, **kwargs: Any) -> Any:
        """A call in the use of that number; RuntimeError if the state is no longer what that use left."""
        inputs = self.manifest.inputs
        leaves = inputs.arguments.bind(args, kwargs)
        sizes = inputs.sizes(leaves)
        program = inputs.program(sizes, leaves)
        if inputs.buckets:
            pads = [self.manifest.pad_value.get(name, 0) for name in inputs.arguments.names]
            leaves = [inputs.padded(t, i, program, pad) for i, (t, pad) in enumerate(zip(leaves, pads, strict=True))]
        with self._turn:
            running = self._running()
            if use is not None and use != self._uses_of_state:
                raise RuntimeError(
                    "the state that the ranks keep is not that of this use: another has begun, the weights "
                    "were replaced, or lost processes were started again. Load the model twice for two"
                )
            try:
                outputs = running.call(program, leaves, self.timeout)
            except IndexError as e:
                raise IndexError(f"{e}: {ranges(leaves, inputs.arguments.names)}") from None
        if inputs.buckets:  # without the padding
            for i, shape in enumerate(self.manifest.outputs.shapes):
                outputs[i] = outputs[i][tuple(slice(sizes[m] if isinstance(m, str) else m) for m in shape)].contiguous()
        return put_together(self.manifest.outputs.form, outputs)

    def replace_weights(self, source: str | PathLike[str] | Mapping[str, Tensor]) -> None:
        """Other weights, without tracing again: a checkpoint in any form and at any degree, or an unsharded
        state_dict. CheckpointError if it does not fit; then nothing is changed."""
        new = OwnedDirectory("tpcore-weights-")
        try:
            self._replace(source, Path(new.name))
        except BaseException:
            new.cleanup()
            raise
        if self._replaced is not None:
            self._owned.remove(self._replaced)
            self._replaced.cleanup()
        self._replaced = new
        self._owned.append(new)

    def _replace(self, source: str | PathLike[str] | Mapping[str, Tensor], folder: Path) -> None:
        save_id = uuid.uuid4().hex
        path = str(folder / "unsharded.safetensors" if isinstance(source, Mapping) else Path(source).absolute())
        if isinstance(source, Mapping):
            write_tensors(path, {name: StateTensor(t) for name, t in source.items() if isinstance(t, Tensor)}, {})
        with self._turn:
            workers = self._running()
            records = workers.ask("reshard", path, str(folder), save_id)
            workers.ask("take", str(folder))
            self._uses_of_state += 1
            workers.weights = folder
        new = {weights_file(Path(), rank).as_posix(): record for rank, record in enumerate(records)}
        self.manifest = replace(self.manifest, files={**self.manifest.files, **new}, save_id=save_id)

    @property
    def weights_folder(self) -> Path:
        return self._workers.weights

    def close(self) -> None:
        """End the processes. Later calls raise an error, and so does saving a model that was never saved."""
        with self._turn:
            self._end()

    def __enter__(self) -> TensorParallelModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running(self) -> Workers:
        if not self._workers.running:
            if not self._end.alive:
                raise RuntimeError("this traced model was closed: load it again")
            if self.restart or not self._workers.failed:
                self._uses_of_state += 1
                self._workers.start()
        return self._workers

    def train(self, mode: bool = True) -> TensorParallelModel:
        if mode:
            raise RuntimeError("a traced model computes outputs only: train the model it was traced from")
        return super().train(mode)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError("a traced model owns processes and cannot be copied: load it a second time")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a traced model owns processes and cannot be pickled: parallel_model_save writes it")

    def extra_repr(self) -> str:
        m = self.manifest
        return f"{m.inputs}, tp={m.tp}, backend={m.backend!r}"


def _end(workers: Workers, owned: list[TemporaryDirectory[str]]) -> None:
    workers.close()
    for directory in owned:
        directory.cleanup()
