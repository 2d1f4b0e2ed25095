"""Writing a checkpoint: what each rank contributes, and the steps by which it becomes one."""

from __future__ import annotations

import json
import os
import platform
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor, nn

from ..agree import gather_bytes, together
from ..context import current
from ..errors import CheckpointError
from ..shard import ShardSpec
from .files import naming, sync_dir, write_file
from .manifest import FORMAT, MANIFEST, STATE, VERSION, FileRecord, Manifest, dumps, rank_dir
from .progress import Steps, Tell, Tick, nothing
from .retention import keep_last
from .specs import Cut, cuts_of, memory_of
from .staging import Staging, staging_path
from .tensorfile import Writable, dtype_name, nbytes_of, write_tensors
from .tree import TAG, Path, encode, spell


@dataclass(frozen=True)
class Options:
    """``all_dp``: every dp rank writes a share. ``background``: the values are copied first."""

    serially: bool = False
    down_cast_bf16: bool = False
    all_dp: bool = False
    background: bool = False
    keep_last: int | None = None


_FILE_STEM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class Entry(Writable, Protocol):
    """One tensor to write, and how it is cut."""

    @property
    def cut(self) -> Cut: ...


@dataclass(frozen=True)
class _Held:
    dtype: torch.dtype
    cut: Cut
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def pieces(self) -> list[Tensor]:
        return [self.host().contiguous()]

    def host(self) -> Tensor:
        # moved first: a lazy device would compile a program to convert it
        return self.tensor.detach().cpu().to(self.dtype).resolve_conj().resolve_neg()


CutOf = Callable[[Tensor, str], Cut]


class Part:
    """What one rank writes: its state as JSON, and its tensors by file and name."""

    def __init__(self, state: dict[Any, Any], cut_of: CutOf, *, down_cast_bf16: bool = False) -> None:
        if not isinstance(state, dict):
            raise ValueError(
                f"a checkpoint is made of a dict, a state_dict say, not of a {type(state).__name__}"
            )
        self._cut_of, self._down_cast = cut_of, down_cast_bf16
        self._places: dict[Any, dict[str, Any]] = {}
        self.files: dict[str, dict[str, _Held]] = defaultdict(dict)
        self._stems: dict[Any, str] = {}
        self.tree = encode(state, self._leaf)

    def _leaf(self, t: Tensor, path: Path) -> dict[str, Any]:
        """Where ``t`` is stored. Tensors that are the same memory are stored once."""
        where = spell(path)
        if type(t) not in (Tensor, nn.Parameter) or t.layout != torch.strided or t.is_quantized:
            kind = f"{type(t).__name__} of layout {t.layout}, dtype {t.dtype}"
            raise ValueError(f"cannot save {where}: a {kind}")
        if t.is_meta:
            raise ValueError(f"cannot save {where}: it is on the meta device and has no values")
        place = memory_of(t), self._cut_of(t, where)
        if place not in self._places:
            file = self._file(path)
            name = _unused(".".join(map(str, path[1:] or path)), (*self.files[file], "__metadata__"))
            # not where it has no dims: those count steps, and bfloat16 counts to 256
            narrow = self._down_cast and t.dtype == torch.float32 and t.ndim > 0
            self.files[file][name] = _Held(torch.bfloat16 if narrow else t.dtype, place[1], t)
            self._places[place] = {TAG: "tensor", "file": file, "name": name}
        return self._places[place]

    def _file(self, path: Path) -> str:
        """One file per top-level entry, called like it where that makes a file name."""
        top = path[:1] if len(path) > 1 else ("tensors", "of the top level")
        if top not in self._stems:
            fits = isinstance(top[0], str) and _FILE_STEM.fullmatch(top[0])
            self._stems[top] = _unused(str(top[0]) if fits else "part", self._stems.values())
        return f"{self._stems[top]}.safetensors"

    def share(self, rank: int, n: int) -> Mapping[str, Mapping[str, Entry]]:
        """The files that ``rank`` of ``n`` ranks that hold the same writes; every rank names all alike."""
        if n == 1:
            return self.files
        load, out = [0] * n, defaultdict[str, dict[str, Entry]](dict)
        places = {(p["file"], p["name"]): p for p in self._places.values()}
        for (file, name), place in sorted(places.items(), key=lambda at: (-self._bytes(*at[0]), at[0])):
            who = load.index(min(load))
            load[who] += self._bytes(file, name)
            place["file"] = file.removesuffix(".safetensors") + f".dp{who}.safetensors"
            if who == rank:
                out[place["file"]][name] = self.files[file][name]
        return out

    def _bytes(self, file: str, name: str) -> int:
        return nbytes_of(self.files[file][name])

    def to_host(self) -> None:
        """Copy all values, so that what is written later is what they are now."""
        for entries in self.files.values():
            for name, entry in entries.items():
                # a copy on any device: what is on the CPU already is the model's own memory
                entries[name] = _Held(entry.dtype, entry.cut, entry.host().clone())


def total_of(files: Mapping[str, Mapping[str, Entry]]) -> int:
    return sum(nbytes_of(entry) for entries in files.values() for entry in entries.values())


def write_tensor_files(
    root: str, name: str, save_id: str, files: Mapping[str, Mapping[str, Entry]], tick: Tick = nothing
) -> tuple[dict[str, FileRecord], dict[str, Any]]:
    """Write files of tensors into the directory ``name`` of ``root``; what goes on record."""
    here = os.path.join(root, name)
    if not os.path.isdir(root):
        raise CheckpointError(f"{root}, made by rank 0, is not here: do all ranks share the file system?")
    with naming("make the directory", here), suppress(FileExistsError):
        os.mkdir(here)
    records, tensors = {}, {}
    for file, entries in sorted(files.items()):
        metadata = {"format": "pt", "save_id": save_id, "rank": name}
        records[f"{name}/{file}"], sums = write_tensors(os.path.join(here, file), entries, metadata, tick)
        tensors[file] = {key: _record(entry, sums[key]) for key, entry in entries.items()}
    return records, tensors


def _record(entry: Entry, crc32: str) -> dict[str, Any]:
    cut = entry.cut.to_json() if isinstance(entry.cut, ShardSpec) else entry.cut
    return {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape), "crc32": crc32, "spec": cut}


def write_state(root: str, name: str, save_id: str, tensors: Any, tree: Any) -> dict[str, FileRecord]:
    """Write what says where each tensor of the directory is, and everything that is no tensor."""
    state = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": save_id,
        "rank": name,
        "tensors": tensors,
        "state": tree,
    }
    here = os.path.join(root, name)
    record = write_file(os.path.join(here, STATE), [dumps(state)])
    sync_dir(here)
    return {f"{name}/{STATE}": record}


def put_in_place(
    staging: Staging, save_id: str, mesh: Mapping[str, int], files: Mapping[str, FileRecord]
) -> None:
    """Write the manifest over what the ranks have written, and make it the checkpoint of its name."""
    manifest = Manifest(save_id, dict(mesh), files, _versions())
    write_file(os.path.join(staging.path, MANIFEST), [manifest.to_json()])
    sync_dir(staging.path)
    staging.commit()


def _unused(name: str, used: Iterable[str]) -> str:
    """``name``, or with a number if it is taken; case does not count, as on some file systems."""
    taken = {u.lower() for u in used}
    candidate, i = name, 1
    while candidate.lower() in taken:
        i += 1
        candidate = f"{name}-{i}"
    return candidate


class Save:
    """One save on one rank. ``prepare`` and ``start`` are collective over the world; so is ``finish``.

    Between them ``write`` needs no other rank, and may run in a thread of its own.
    """

    def __init__(self, state: dict[Any, Any], save_dir: str | os.PathLike[str], options: Options) -> None:
        self.ctx, self.options = current(), options
        ctx = self.ctx
        # on all ranks, for some do not read: what is still to be computed may need them
        ctx.backend.mark_step()
        at = ctx.mesh.coords(ctx.rank)
        self._dp = (at.get("dp", 0), ctx.mesh.axes.get("dp", 1)) if options.all_dp else (0, 1)
        self._first = at.get("dp", 0) == 0
        self._part: Part | None = None
        self.staging: Staging | None = None
        with together(ctx):
            if self._first or options.all_dp:
                cut_of = cuts_of(state, ctx)
                self._part = Part(state, cut_of, down_cast_bf16=options.down_cast_bf16)
                if options.background:
                    self._part.to_host()
        # rank 0 says where: a relative name may mean another place elsewhere
        said = json.dumps([uuid.uuid4().hex, os.path.realpath(save_dir)]).encode()
        self.save_id, self.target = json.loads(gather_bytes(said, ctx.world)[0])
        self.root = staging_path(self.target, self.save_id)
        with together(ctx), naming("save", self.target):
            if ctx.rank == 0:
                self.staging = Staging(self.target, self.save_id)

    def name_of(self, rank: int) -> str:
        at = self.ctx.mesh.coords(rank)
        return rank_dir(at.get("tp", 0), at.get("pp", 0), self.ctx.mesh.axes.get("pp", 1))

    def write(self, tell: Tell = nothing) -> bytes:
        """Write this rank's tensors; what ``put_together`` has to hear of it from every rank."""
        if self._part is None:
            return b"null"
        name = self.name_of(self.ctx.rank)
        with naming("save", self.target):
            files = self._part.share(*self._dp)
            steps = Steps(total_of(files), tell)
            records, tensors = write_tensor_files(self.root, name, self.save_id, files, steps)
            if self._dp[1] > 1:
                sync_dir(os.path.join(self.root, name))
        tree = self._part.tree if self._first else None
        self._part = None  # in the background: frees the copy
        return json.dumps([name, records, tensors, tree]).encode()

    def put_together(self, heard: Sequence[bytes]) -> None:
        """On rank 0: each directory's state, the manifest, and the name. ``heard`` of all ranks."""
        if self.staging is None:
            return
        files: dict[str, FileRecord] = {}
        tensors: dict[str, dict[str, Any]] = defaultdict(dict)
        trees: dict[str, Any] = {}
        for data in heard:
            said = json.loads(data)
            if said is not None:
                name, records, its_tensors, tree = said
                files |= {path: FileRecord(*record) for path, record in records.items()}
                tensors[name] |= its_tensors
                trees[name] = trees.get(name) or tree
        with naming("save", self.target):
            for name, tree in trees.items():
                files |= write_state(self.root, name, self.save_id, tensors[name], tree)
            put_in_place(self.staging, self.save_id, self.ctx.mesh.axes, files)
            if self.options.keep_last is not None:
                keep_last(self.target, self.options.keep_last)

    def close(self) -> None:
        if self.staging is not None:
            self.staging.close()
            self.staging = None


def write_checkpoint(state: dict[Any, Any], save_dir: str | os.PathLike[str], options: Options) -> None:
    """Write ``state``, each tp rank its own, as the checkpoint ``save_dir``. Collective over the world.

    The previous checkpoint of that name stays whole until the new one takes its place. Raises on every
    rank if one fails, and then leaves nothing behind.
    """
    save = Save(state, save_dir, options)
    ctx, said = save.ctx, b"null"
    try:
        for turn in range(ctx.mesh.size) if options.serially else (ctx.rank,):
            with together(ctx):
                if turn == ctx.rank:
                    said = save.write()
        heard = gather_bytes(said, ctx.world)
        with together(ctx):
            save.put_together(heard)
    finally:
        save.close()


def _versions() -> dict[str, str]:
    from .. import __version__  # here: tpcore itself is not whole while this module is imported

    return {
        "tpcore": __version__,
        "torch": str(torch.__version__),
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
