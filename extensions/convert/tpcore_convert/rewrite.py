"""Rewrites checkpoints of any form: unsharded as files for ``from_pretrained``, for another degree, without pickle."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

import torch
from safetensors.torch import load_file

from tpcore.checkpoint.forms.native import Native
from tpcore.checkpoint.forms.source import Reading, Source, SpecOf
from tpcore.checkpoint.forms.whole import INDEX
from tpcore.checkpoint.manifest import FORMAT, rank_dir
from tpcore.checkpoint.read.source import ShardRule, StrPath, model_of, once, opened, specs_by, tensors_of, unsharded
from tpcore.checkpoint.storage.files import (
    CHUNK,
    MANIFEST,
    SILENT,
    FileRecord,
    Progress,
    dumps,
    make_dirs,
    naming,
    sync_dir,
    write_file,
)
from tpcore.checkpoint.storage.publish import OwnedDirectory, Staging
from tpcore.checkpoint.storage.tensorfile import Writable, nbytes_of, write_tensors
from tpcore.checkpoint.stored import ReadPlan, Stored
from tpcore.checkpoint.write.save import put_in_place, write_state, write_tensor_files
from tpcore.checkpoint.write.snapshot import Part, total_of
from tpcore.errors import CheckpointError
from tpcore.layout.mesh import Mesh

from .inspect import check_degree

_NOT_COPIED = tuple(
    ".safetensors .bin .pt .pth .ckpt .h5 .msgpack .gguf .onnx .index.json trainer_state.json".split()  # noqa: SIM905
)
"""Ends of the names of weights and of a training's state: all else in a folder of transformers travels."""
_TEMPLATES = "additional_chat_templates"


def consolidate(
    src: StrPath,
    out: StrPath,
    *,
    pickled: bool = False,
    max_shard_size: int | None = None,
    rules: Sequence[ShardRule] = (),
    how: Reading | None = None,
    progress: Progress = SILENT,
    stored_as: Callable[[Mapping[str, ReadPlan]], Mapping[str, Writable]] | None = None,
    beside: StrPath | None = None,
    adapter: bool = False,
) -> list[str]:
    """Write the unsharded model in ``src`` to the directory ``out``. Returns the names of the files.

    Writes ``model.safetensors``, or ``pytorch_model.bin`` if ``pickled``; several files and an index of a model larger
    than ``max_shard_size`` bytes. The model's configuration, tokenizer and code are copied from ``beside``, by default
    ``src``. ``stored_as``: of tensors by name, those to write; what it leaves out is tied to another. ``adapter``:
    peft's files are written, ``adapter_model.safetensors`` and what lies beside ``adapter_config.json``.
    """
    with opened(src, how or Reading(), rules) as source:
        unique, ties = once(tensors_of(source, rules), source.path)
        if isinstance(source, Native):
            _refuse_quantized(unique, source.path)
        tensors: Mapping[str, Writable] = unique
        if stored_as is not None:
            tensors, ties = stored_as({**unique, **{other: unique[kept] for other, kept in ties.items()}}), {}
        stem, end = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
        files = divided(tensors, max_shard_size, "adapter_model" if adapter else stem, end)
        progress.start(sum(map(nbytes_of, tensors.values())))
        with _new_files(os.fspath(out)) as stage:
            names = write_weights(stage, files, ties, progress)
            config = "adapter_config.json" if adapter else "config.json"
            names += _copy_model_files(os.fspath(beside or src), stage, os.fspath(out), config)
            sync_dir(stage)
    return names


def _refuse_quantized(names: Mapping[str, object], path: str) -> None:
    scale = next((n for n in names if n.endswith(".weight_scale") and n.removesuffix("_scale") in names), None)
    if scale is not None:
        raise CheckpointError(
            f"{path} has quantized weights, {scale!r} beside one: files of transformers have no such form, and "
            "would be read without the scale; load it by tpcore.checkpoint.load into parallelize(model, quantize=...)"
        )


W = TypeVar("W", bound=Writable)


def divided(
    tensors: Mapping[str, W], limit: int | None, stem: str = "model", end: str = ".safetensors"
) -> dict[str, dict[str, W]]:
    """The tensors of each file, by its name: in order, each of at most ``limit`` bytes or of one tensor."""
    groups: list[dict[str, W]] = [{}]
    size = 0
    for name, t in tensors.items():
        if groups[-1] and limit is not None and size + nbytes_of(t) > limit:
            groups.append({})
            size = 0
        groups[-1][name], size = t, size + nbytes_of(t)
    if len(groups) == 1:
        return {f"{stem}{end}": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}{end}": group for i, group in enumerate(groups, 1)}


def write_weights(
    folder: str, files: Mapping[str, Mapping[str, Writable]], ties: Mapping[str, str], progress: Progress = SILENT
) -> list[str]:
    """Write the tensors of ``files``, and an index of several. Returns the names. ``ties``: further names."""
    for name, group in files.items():
        of_group = {other: kept for other, kept in ties.items() if kept in group}
        _write_weight_file(os.path.join(folder, name), group, of_group, progress)
    names = list(files)
    if len(names) > 1:
        total = {"total_size": sum(nbytes_of(t) for group in files.values() for t in group.values())}
        weight_map = {t: name for name, group in files.items() for t in group}
        names.append(re.sub(r"-\d+-of-\d+", "", names[0]) + INDEX)
        text = dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        write_file(os.path.join(folder, names[-1]), [text])
    return names


def _write_weight_file(path: str, tensors: Mapping[str, Writable], ties: Mapping[str, str], progress: Progress) -> None:
    if not path.endswith(".bin"):
        write_tensors(path, tensors, {"format": "pt", **ties}, progress, summed=False)
        return
    # torch.save needs all tensors at once: write them to a scratch file first, and map it
    scratch = f"{path}.safetensors"
    write_tensors(scratch, tensors, {"format": "pt"}, progress, summed=False)
    state = load_file(scratch)
    with naming("write", path):
        with open(path, "xb") as f:
            torch.save({name: state[name] for name in tensors} | {o: state[k] for o, k in ties.items()}, f)
            f.flush()
            os.fsync(f.fileno())
        os.unlink(scratch)


def _copy_model_files(src: str, stage: str, out: str, config: str) -> list[str]:
    """Copy configurations, tokenizer and code: what lies beside ``config`` in ``src`` or its parent."""
    parents = (src, os.path.dirname(os.path.realpath(src)))
    folder = next((folder for folder in parents if os.path.isfile(os.path.join(folder, config))), None)
    if folder is None:
        return []
    templates, copied = os.path.join(folder, _TEMPLATES), []
    names = os.listdir(folder)
    names += [os.path.join(_TEMPLATES, n) for n in os.listdir(templates)] if os.path.isdir(templates) else []
    for name in sorted(names):
        path, there = os.path.join(folder, name), os.path.join(out, name.partition(os.sep)[0])
        wanted = not name.startswith(".") and not name.endswith(_NOT_COPIED) and name != MANIFEST
        if wanted and os.path.isfile(path) and not os.path.lexists(there):
            with naming("copy", path), open(path, "rb") as f:
                os.makedirs(os.path.dirname(os.path.join(stage, name)), exist_ok=True)
                write_file(os.path.join(stage, name), iter(partial(f.read, CHUNK), b""))
            copied.append(name)
    return copied


@contextmanager
def replacement(target: str) -> Iterator[str]:
    """A path to write at, which is then renamed to ``target``; of a directory, which may be a file system of its own,
    it is inside, and the files are moved there, the index last. What killed processes have left there goes."""
    parent, name = os.path.split(target)
    make_dirs(parent)
    prefix, home = (".writing-", target) if os.path.isdir(target) else (f".{name}.writing-", parent)
    with naming("write in", home), OwnedDirectory(prefix, home) as folder:
        new = os.path.join(folder, "new")
        yield new
        with naming("put in place", target):
            if not os.path.isdir(target):
                os.rename(new, target)
            else:
                for file in sorted(os.listdir(new), key=lambda n: (n.endswith(INDEX), n)):
                    os.rename(os.path.join(new, file), os.path.join(target, file))
                sync_dir(target)
        sync_dir(parent)


@contextmanager
def _new_files(out: str) -> Iterator[str]:
    """A directory to write in for ``out``. CheckpointError if ``out`` has files of weights already, or is a checkpoint:
    the next save there would leave old weights."""
    out = os.path.realpath(out)
    names = os.listdir(out) if os.path.isdir(out) else []
    if MANIFEST in names:
        raise CheckpointError(f"{out} is a checkpoint: give another directory, or a new one inside it")
    for other in sorted(names):
        if other.startswith(("model.", "model-", "pytorch_model")):
            raise CheckpointError(f"{os.path.join(out, other)} is there already: give another directory")
    with replacement(out) as stage:
        os.mkdir(stage)
        yield stage


def reshard(
    src: StrPath,
    out: StrPath,
    tp: int,
    *,
    strict: bool = True,
    rules: Sequence[ShardRule] = (),
    how: Reading | None = None,
    progress: Progress = SILENT,
) -> list[str]:
    """Write the contents of ``src`` as a checkpoint for ``tp`` ranks. ``strict=False`` leaves out entries that can be
    loaded only at the degree of the save. Returns why entries were left out."""
    with opened(src, how or Reading(), rules) as source:
        check_degree(tp, source, rules)
        joined = not isinstance(source, Native)
        return _write_shards(source, out, tp, joined=joined, strict=strict, rules=rules, progress=progress)[1]


def _write_shards(
    source: Source, out: StrPath, tp: int, *, joined: bool, strict: bool, rules: Sequence[ShardRule], progress: Progress
) -> tuple[list[str], list[str]]:
    """Write ``source`` for ``tp`` ranks in each of its stages. Returns the names of the ranks' directories, and why
    entries were left out. ``joined``: the stages become one, of the model and the entries that all ranks have alike."""
    cuts, mesh = specs_by(rules), Mesh({"pp": 1 if joined else source.pp, "tp": tp})
    save_id, target = uuid.uuid4().hex, os.path.realpath(out)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise CheckpointError(f"{os.fspath(out)} is there already: give another name")
    model = _joined(source, cuts) if joined else {}
    left: dict[str, None] = {}
    files: dict[str, FileRecord] = {}
    with closing(Staging(target, save_id, FORMAT)) as staging:
        for rank in range(mesh.size):
            at = mesh.coords(rank)
            tp_rank = at["tp"] if not joined and source.tp == tp else None
            stage = source.stage(at["pp"], tp_rank, cuts)
            bound = stage.bound(model=not joined)
            if bound and strict:
                raise CheckpointError(f"{next(iter(bound.values()))}. It can be left out")
            left |= dict.fromkeys(bound.values())
            if joined:
                entries = stage.entries(unsharded, {"model", *bound})
                state = {"model": {name: stored.plan(None, rank, mesh) for name, stored in model.items()}, **entries}
            else:
                state = stage.entries(lambda stored: stored.plan(None, rank, mesh), bound, model=True)  # noqa: B023
            contents, name = Part(state, lambda t, where: None), rank_dir(at["tp"], at["pp"], mesh.axes["pp"])
            if not files:
                progress.start(total_of(contents.files) * mesh.size)  # ranks have about the same size
            records, tensors = write_tensor_files(staging.path, name, save_id, contents.files, progress)
            files |= records | write_state(staging.path, name, save_id, tensors, contents.tree)
        put_in_place(staging, save_id, mesh.axes, files)
    return sorted({name.partition("/")[0] for name in files}), list(left)


def _joined(source: Source, cuts: SpecOf) -> dict[str, Stored]:
    """The model of all stages, each tensor once, with an explicit layout: uncut if all ranks hold the same."""
    model = model_of(source, cuts)
    plain = sorted(name for name, item in model.items() if not isinstance(item, Stored))
    if plain:
        raise CheckpointError(f"{source.path}: {plain[0]!r} is not a tensor: only a model can load it")
    plans, ties = once(model, source.path)
    tensors = {}
    for name, plan in plans.items():
        stored = plan.stored
        tensors[name] = Stored(stored.where, stored.known_layout(), stored.mesh, None, stored.shard)
    return {name: tensors[ties.get(name, name)] for name in model}


def convert(
    src: StrPath,
    out: StrPath,
    *,
    rules: Sequence[ShardRule] = (),
    how: Reading | None = None,
    progress: Progress = SILENT,
) -> list[str]:
    """Write ``src`` without pickle: shards of other libraries as a checkpoint of the same degree, else the file ``out``
    if that ends in ``.safetensors``, or a directory. Returns the names of written files or directories."""
    how = how or Reading()
    with opened(src, how, rules) as source:
        if isinstance(source, Native):
            raise CheckpointError(f"{source.path} is a tpcore checkpoint already: consolidate or reshard it")
        if source.sharded:
            if os.fspath(out).endswith(".safetensors"):
                raise CheckpointError(f"{source.path} has shards, of which a folder is written: {out} names a file")
            mixed = source.mixed
            return _write_shards(source, out, source.tp, joined=mixed, strict=True, rules=rules, progress=progress)[0]
        if not os.fspath(out).endswith(".safetensors"):
            return consolidate(src, out, how=how, progress=progress)
        target = os.path.realpath(out)
        if os.path.lexists(target):
            raise CheckpointError(f"{target} is there already: give another name")
        tensors, ties = once(tensors_of(source, rules), source.path)
        with replacement(target) as temporary:
            progress.start(sum(map(nbytes_of, tensors.values())))
            write_tensors(temporary, tensors, {"format": "pt", **ties}, progress, summed=False)
    return [os.path.basename(target)]
