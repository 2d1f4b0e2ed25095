"""From one form of checkpoint to another, tensor by tensor: memory for one at a time, whatever the total."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import CheckpointError
from .files import make_dirs, naming, sync_dir, write_file
from .huggingface import INDEX
from .manifest import FileRecord, dumps, rank_dir
from .reader import View
from .source import CutRule, Source, cuts_by, opened, part
from .specs import Cut
from .staging import Staging
from .stored import MemoryShard, Shard, Stored
from .tensorfile import write_tensors
from .tree import is_tensor, leaves, only, spell
from .unsharded import Reading
from .writing import Entry, Part, put_in_place, write_state, write_tensor_files

StrPath = str | os.PathLike[str]
Tick = Callable[[int], None]
"""Called with the bytes of each tensor that has been written."""

# what from_pretrained reads beside the weights
_BESIDE = ("config.json", "generation_config.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model")
_BESIDE_STEMS = ("tokenizer", "special_tokens_map", "added_tokens", "preprocessor_config", "chat_template")


@dataclass(frozen=True)
class _Lazy:
    """A shard of a stored tensor, made when its turn to be written comes."""

    stored: Stored
    rank: int
    n: int
    tick: Tick

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.local_shape(None, self.n)

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def cut(self) -> Cut:
        return self.stored.cut

    @property
    def nbytes(self) -> int:
        out = self.dtype.itemsize
        for size in self.shape:
            out *= size
        return out

    def host(self) -> Tensor:
        made = part(self.stored, self.rank, self.n)
        self.tick(self.nbytes)
        return made


def _nothing(_: int) -> None:
    pass


# -- to one degree ------------------------------------------------------------------------------------------
def consolidate(
    src: StrPath,
    out: StrPath,
    *,
    pickled: bool = False,
    max_shard_size: int | None = None,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    tick: Tick = _nothing,
) -> list[str]:
    """Write the model in ``src``, whole, into the directory ``out``; returns the names of the files.

    ``model.safetensors``, or ``pytorch_model.bin`` if ``pickled``; several of at most ``max_shard_size``
    bytes and an index where it takes more than one. Configuration and tokenizer files are copied.
    """
    with opened(src, how or Reading(), rules) as source:
        tensors, ties = _once(source, tick)
        groups = _groups(tensors, max_shard_size)
        stem, end = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
        width = f"{len(groups):05d}"
        names = [
            f"{stem}{end}" if len(groups) == 1 else f"{stem}-{i:05d}-of-{width}{end}"
            for i in range(1, len(groups) + 1)
        ]
        with _new_files(os.fspath(out)) as stage:
            for name, group in zip(names, groups, strict=True):
                here = {other: kept for other, kept in ties.items() if kept in group}
                _write_file(os.path.join(stage, name), group, here, pickled)
            if len(groups) > 1:
                index = f"{stem}{end}{INDEX}"
                where = {t: name for name, group in zip(names, groups, strict=True) for t in group}
                total = {"total_size": sum(t.nbytes for t in tensors.values())}
                text = dumps({"metadata": total, "weight_map": where}, indent=2)
                write_file(os.path.join(stage, index), [text])
                names.append(index)
            for path in _beside(os.fspath(src)):
                if not os.path.lexists(os.path.join(os.fspath(out), os.path.basename(path))):
                    with naming("copy", path), open(path, "rb") as f:
                        write_file(os.path.join(stage, os.path.basename(path)), [f.read()])
                    names.append(os.path.basename(path))
            _sync_all(stage)
    return names


def _once(source: Source, tick: Tick) -> tuple[dict[str, _Lazy], dict[str, str]]:
    """Every tensor under its first name, and that name by each other one that a tied weight has."""
    first: dict[object, str] = {}
    tensors: dict[str, _Lazy] = {}
    ties: dict[str, str] = {}
    for name, stored in source.tensors():
        kept = first.setdefault((stored.first.identity, stored.cut), name)
        if kept == name:
            stored.whole()  # says why not before anything is written
            tensors[name] = _Lazy(stored, 0, 1, tick)
        else:
            ties[name] = kept
    if not tensors:
        raise CheckpointError(f"{source.path} holds no tensors of a model")
    return tensors, ties


def _groups(tensors: Mapping[str, _Lazy], limit: int | None) -> list[dict[str, _Lazy]]:
    """In order, each of at most ``limit`` bytes or of one tensor."""
    groups: list[dict[str, _Lazy]] = []
    held = 0
    for name, t in tensors.items():
        if not groups or (limit is not None and held + t.nbytes > limit):
            groups.append({})
            held = 0
        groups[-1][name] = t
        held += t.nbytes
    return groups


def _write_file(path: str, tensors: Mapping[str, _Lazy], ties: Mapping[str, str], pickled: bool) -> None:
    if not pickled:
        write_tensors(path, tensors, {"format": "pt", **ties})
        return
    # torch.save takes all tensors at once: they go to the disk first, and come mapped from there
    scratch = f"{path}.safetensors"
    write_tensors(scratch, tensors, {"format": "pt"})
    state = load_file(scratch)
    with naming("write", path):
        torch.save({name: state[name] for name in tensors} | {o: state[k] for o, k in ties.items()}, path)
        os.unlink(scratch)


def _beside(src: str) -> Iterator[str]:
    """Configuration and tokenizer of a model directory, which lie in it or above its folder of shards."""
    for folder in (src, os.path.dirname(os.path.realpath(src))):
        if os.path.isfile(os.path.join(folder, "config.json")):
            for name in sorted(os.listdir(folder)):
                wanted = name in _BESIDE or name.partition(".")[0] in _BESIDE_STEMS
                if wanted and os.path.isfile(os.path.join(folder, name)):
                    yield os.path.join(folder, name)
            return


@contextmanager
def _new_files(out: str) -> Iterator[str]:
    """A directory to write in, whose files then appear in ``out``, the index last. None may be there."""
    out = os.path.realpath(out)
    held = os.listdir(out) if os.path.isdir(out) else []
    for name in sorted(held):
        if name.startswith(("model.", "model-", "pytorch_model")):
            raise CheckpointError(f"{os.path.join(out, name)} is there already: give another directory")
    make_dirs(os.path.dirname(out))
    stage = os.path.join(os.path.dirname(out), f".{os.path.basename(out)}.writing-{uuid.uuid4().hex}")
    try:
        with naming("make the directory", stage):
            os.mkdir(stage)
        yield stage
        if not os.path.isdir(out):
            with naming("put in place", out):
                os.rename(stage, out)
        else:
            for name in sorted(os.listdir(stage), key=lambda n: (n.endswith(INDEX), n)):
                with naming("put in place", os.path.join(out, name)):
                    os.rename(os.path.join(stage, name), os.path.join(out, name))
        sync_dir(os.path.dirname(out))
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _sync_all(stage: str) -> None:
    for name in os.listdir(stage):
        with naming("sync", name), open(os.path.join(stage, name), "rb") as f:
            os.fsync(f.fileno())
    sync_dir(stage)


# -- to another degree --------------------------------------------------------------------------------------
def reshard(
    src: StrPath,
    out: StrPath,
    tp: int,
    *,
    strict: bool = True,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    tick: Tick = _nothing,
) -> list[str]:
    """Write what ``src`` holds as a checkpoint for ``tp`` ranks; returns what was left out, and why.

    ``strict=False`` leaves out entries that can be had only at the degree at which they were saved.
    """
    if tp < 1:
        raise ValueError(f"tp={tp} is no number of ranks")
    left: list[str] = []
    with opened(src, how or Reading(), rules) as source, _staged(out) as (staging, save_id):
        files: dict[str, FileRecord] = {}
        for pp_rank in range(source.pp if source.checkpoint else 1):
            for rank in range(tp):
                pp = source.pp if source.checkpoint else 1
                name = rank_dir(rank, pp_rank, pp)
                tree, tensors = _rank_of(source, rank, tp, pp_rank, tick, left if strict is False else None)
                files |= _write_rank(staging.path, name, save_id, tensors, tree)
        mesh = {"pp": source.pp if source.checkpoint else 1, "tp": tp}
        put_in_place(staging, save_id, mesh, files)
    return left


def _rank_of(
    source: Source, rank: int, n: int, pp_rank: int, tick: Tick, left: list[str] | None
) -> tuple[Any, dict[str, dict[str, _Lazy]]]:
    """The state of one rank of ``n``, encoded, and its tensors by file and name."""
    if source.checkpoint is None:
        tensors, ties = _once(source, tick)
        file = "model.safetensors"
        names = {name: name for name in tensors} | ties
        plain = {k: v for k, v in source.model.items() if not isinstance(v, Stored)}
        if plain:
            raise CheckpointError(
                f"{source.path}: {sorted(plain)[0]!r} is no tensor; only a model can say it"
            )
        tree = {"model": {k: {"$": "tensor", "file": file, "name": names[k]} for k in source.model}}
        lazy = {k: _Lazy(_recorded(t.stored), rank, n, tick) for k, t in tensors.items()}
        return tree, {file: lazy}
    view = View(source.checkpoint, rank, n, pp_rank)
    kept = dict(view.entries)
    for key in view.entries:
        why = view.bound(key)
        if why is not None and left is None:
            raise CheckpointError(f"{why}. It can be left out")
        if why is not None and left is not None:
            del kept[key]
            left.extend([why] if why not in left else [])
    tree, files = only(view.tree, kept), dict[str, dict[str, _Lazy]]()
    for path, leaf in leaves(tree):
        if is_tensor(leaf):
            lazy_one = _Lazy(view.stored(leaf, spell(path)), rank, n, tick)
            files.setdefault(leaf["file"], {})[leaf["name"]] = lazy_one
    return tree, files


def _recorded(stored: Stored) -> Stored:
    """With its cut, which is none where all ranks hold the same."""
    cut, _ = stored.whole()
    return Stored(stored.where, cut, stored.m if cut is stored.cut else 1, stored.own, stored.shard)


def _write_rank(
    root: str, name: str, save_id: str, files: Mapping[str, Mapping[str, Entry]], tree: Any
) -> dict[str, FileRecord]:
    records, tensors = write_tensor_files(root, name, save_id, files)
    return records | write_state(root, name, save_id, tensors, tree)


@contextmanager
def _staged(out: StrPath) -> Iterator[tuple[Staging, str]]:
    save_id = uuid.uuid4().hex
    staging = Staging(os.path.realpath(out), save_id)
    try:
        yield staging, save_id
    finally:
        staging.close()


# -- to this library's own forms ----------------------------------------------------------------------------
def convert(
    src: StrPath,
    out: StrPath,
    *,
    rules: Sequence[CutRule] = (),
    how: Reading | None = None,
    tick: Tick = _nothing,
) -> list[str]:
    """Write what ``src`` holds in the same cut, but without pickle; returns the names of what was written.

    Shards that others wrote become a checkpoint of the same degree, with all that lies beside the model.
    The model in an unsharded file becomes ``out`` if that ends in ``.safetensors``, else a directory.
    """
    how = how or Reading()
    with opened(src, how, rules) as source:
        if source.checkpoint is not None:
            raise CheckpointError(f"{source.path} is a tpcore checkpoint already: consolidate or reshard it")
        if source.foreign is not None:
            return _convert_shards(source, out, how, rules, tick)
        if not os.fspath(out).endswith(".safetensors"):
            return consolidate(src, out, how=how, tick=tick)
        target = os.path.realpath(out)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} is there already: give another name")
        tensors, ties = _once(source, tick)
        temporary = os.path.join(
            os.path.dirname(target), f".{os.path.basename(target)}.writing-{uuid.uuid4().hex}"
        )
        try:
            make_dirs(os.path.dirname(target))
            write_tensors(temporary, tensors, {"format": "pt", **ties})
            with naming("put in place", target):
                os.rename(temporary, target)
            sync_dir(os.path.dirname(target))
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
    return [os.path.basename(target)]


def _convert_shards(
    source: Source, out: StrPath, how: Reading, rules: Sequence[CutRule], tick: Tick
) -> list[str]:
    foreign = source.foreign
    if foreign is None:
        return []
    with _staged(out) as (staging, save_id):
        files: dict[str, FileRecord] = {}
        for stage in range(source.pp):
            for rank in range(source.tp):
                found, rest = foreign.open(how, cuts_by(rules), stage, own_rank=rank)
                shards = {n: _tensor(s.first) if isinstance(s, Stored) else s for n, s in found.items()}
                cuts = {id(shards[n]): s.cut for n, s in found.items() if isinstance(s, Stored)}
                done = Part({how.model_key: shards, **rest}, lambda t, where, c=cuts: c.get(id(t)))  # type: ignore[misc]
                name = rank_dir(rank, stage, source.pp)
                files |= _write_rank(staging.path, name, save_id, done.files, done.tree)
                tick(sum(t.nbytes for t in shards.values() if isinstance(t, Tensor)))
        put_in_place(staging, save_id, {"pp": source.pp, "tp": source.tp}, files)
    return sorted({name.partition("/")[0] for name in files})


def _tensor(shard: Shard) -> Tensor:
    """Mapped, as pickles are: only read when it is written."""
    if not isinstance(shard, MemoryShard):
        raise TypeError(f"{shard} is of no pickle")
    return shard.tensor
