"""Writing a checkpoint: what each rank contributes, and the steps by which it becomes one."""

from __future__ import annotations

import json
import os
import platform
import re
import uuid
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import safetensors
import torch
from torch import Tensor, nn

from ..agree import gather_bytes, together
from ..context import ParallelContext, current
from ..errors import CheckpointError
from ..shard import ShardSpec
from .files import naming, sync_dir, write_file
from .manifest import FORMAT, MANIFEST, STATE, VERSION, FileRecord, Manifest, dumps, rank_dir
from .specs import Cut, optimizer_cuts, spec_of
from .staging import Staging, staging_path
from .tensorfile import dtype_name, write_tensors
from .tree import TAG, Path, encode, spell

_FILE_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


@dataclass(frozen=True)
class _Entry:
    """One tensor to write."""

    tensor: Tensor
    dtype: torch.dtype
    cut: Cut

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def host(self) -> Tensor:
        # moved first: a lazy device would compile a program to convert it
        return self.tensor.detach().cpu().to(self.dtype).resolve_conj().resolve_neg()

    def record(self, crc32: str) -> dict[str, Any]:
        cut = self.cut.to_json() if isinstance(self.cut, ShardSpec) else self.cut
        return {"dtype": dtype_name(self.dtype), "shape": list(self.shape), "crc32": crc32, "spec": cut}


class _Part:
    """What one rank writes: its state as JSON, and its tensors by file and name."""

    def __init__(self, state: dict[Any, Any], ctx: ParallelContext, *, down_cast_bf16: bool) -> None:
        if not isinstance(state, dict):
            raise ValueError(
                f"a checkpoint is made of a dict, a state_dict say, not of a {type(state).__name__}"
            )
        self._ctx, self._down_cast = ctx, down_cast_bf16
        self._optimizer = optimizer_cuts(state, ctx.mesh.axes.get("tp", 1))
        self._places: dict[Any, dict[str, Any]] = {}
        self._files: dict[str, dict[str, _Entry]] = defaultdict(dict)
        self._stems: dict[Any, str] = {}
        self._tree = encode(state, self._leaf)

    def _leaf(self, t: Tensor, path: Path) -> dict[str, Any]:
        """Where ``t`` is stored. Tensors that are the same memory are stored once."""
        where = spell(path)
        if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_quantized:
            kind = f"{type(t).__name__} of layout {t.layout}, dtype {t.dtype}"
            raise ValueError(f"cannot save {where}: a {kind}")
        if t.is_meta:
            raise ValueError(f"cannot save {where}: it is on the meta device and has no values")
        cut: Cut = spec_of(t, self._ctx, where) or self._optimizer.get(id(t))
        memory = _address(t)
        view = t.device, t.dtype, t.storage_offset(), t.shape, t.stride(), t.is_conj(), t.is_neg()
        # lazy devices give no address, and empty tensors have none
        same = (memory, view) if memory else id(t)
        if (same, cut) not in self._places:
            file = self._file(path)
            name = _unused(".".join(map(str, path[1:] or path)), (*self._files[file], "__metadata__"))
            # not where it has no dims: those count steps, and bfloat16 counts to 256
            narrow = self._down_cast and t.dtype == torch.float32 and t.ndim > 0
            self._files[file][name] = _Entry(t, torch.bfloat16 if narrow else t.dtype, cut)
            self._places[same, cut] = {TAG: "tensor", "file": file, "name": name}
        return dict(self._places[same, cut])

    def _file(self, path: Path) -> str:
        """One file per top-level entry, called like it where that makes a file name."""
        top = path[:1] if len(path) > 1 else ("tensors", "of the top level")
        if top not in self._stems:
            fits = isinstance(top[0], str) and _FILE_STEM.fullmatch(top[0])
            self._stems[top] = _unused(str(top[0]) if fits else "part", self._stems.values())
        return f"{self._stems[top]}.safetensors"

    def write(self, root: str, name: str, save_id: str) -> dict[str, FileRecord]:
        """Write the directory ``name`` in ``root``; the records of its files, by path from ``root``."""
        here = os.path.join(root, name)
        if not os.path.isdir(root):
            raise CheckpointError(f"{root}, made by rank 0, is not here: do all ranks share the file system?")
        with naming("make the directory", here):
            os.mkdir(here)
        records, tensors = {}, {}
        for file, entries in sorted(self._files.items()):
            metadata = {"format": "pt", "save_id": save_id, "rank": name}
            records[f"{name}/{file}"], sums = write_tensors(os.path.join(here, file), entries, metadata)
            tensors[file] = {key: entry.record(sums[key]) for key, entry in entries.items()}
        state = {
            "format": FORMAT,
            "version": VERSION,
            "save_id": save_id,
            "rank": name,
            "tensors": tensors,
            "state": self._tree,
        }
        records[f"{name}/{STATE}"] = write_file(os.path.join(here, STATE), [dumps(state)])
        sync_dir(here)
        return records


def _address(t: Tensor) -> int:
    try:
        return t.untyped_storage().data_ptr()
    except RuntimeError:  # torch_xla up to 2.9: its tensors have no storage that Python may ask
        return 0


def _unused(name: str, used: Iterable[str]) -> str:
    """``name``, or with a number if it is taken; case does not count, as on some file systems."""
    taken = {u.lower() for u in used}
    candidate, i = name, 1
    while candidate.lower() in taken:
        i += 1
        candidate = f"{name}-{i}"
    return candidate


def write_checkpoint(
    state: dict[Any, Any], save_dir: str | os.PathLike[str], *, serially: bool, down_cast_bf16: bool
) -> None:
    """Write ``state``, each tp rank its own, as the checkpoint ``save_dir``. Collective over the world.

    The previous checkpoint of that name stays whole until the new one takes its place. ``serially``: one
    rank after the other. Raises on every rank if one fails, and then leaves nothing behind.
    """
    ctx = current()
    ctx.backend.mark_step()  # on all ranks, for some do not read: what is still to be computed may need them
    at = ctx.mesh.coords(ctx.rank)
    name = rank_dir(at.get("tp", 0), at.get("pp", 0), ctx.mesh.axes.get("pp", 1))
    part: _Part | None = None
    staging: Staging | None = None
    records: dict[str, FileRecord] = {}
    with together(ctx):
        if at.get("dp", 0) == 0:
            part = _Part(state, ctx, down_cast_bf16=down_cast_bf16)
    # rank 0 says where: a relative name may mean another place elsewhere
    said = json.dumps([uuid.uuid4().hex, os.path.realpath(save_dir)]).encode()
    save_id, target = json.loads(gather_bytes(said, ctx.world)[0])
    try:
        with together(ctx), naming("save", target):
            if ctx.rank == 0:
                staging = Staging(target, save_id)
        for turn in range(ctx.mesh.size) if serially else (ctx.rank,):
            with together(ctx), naming("save", target):
                if part is not None and turn == ctx.rank:
                    records = part.write(staging_path(target, save_id), name, save_id)
        written = [json.loads(data) for data in gather_bytes(json.dumps(records).encode(), ctx.world)]
        with together(ctx), naming("save", target):
            if staging is not None:
                files = {path: FileRecord(*record) for ranks in written for path, record in ranks.items()}
                manifest = Manifest(save_id, dict(ctx.mesh.axes), files, _versions())
                write_file(os.path.join(staging.path, MANIFEST), [manifest.to_json()])
                sync_dir(staging.path)
                staging.commit()
    finally:
        if staging is not None:
            staging.close()


def _versions() -> dict[str, str]:
    from .. import __version__  # here: tpcore itself is not whole while this module is imported

    return {
        "tpcore": __version__,
        "torch": str(torch.__version__),
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
