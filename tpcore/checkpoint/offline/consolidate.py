"""Writes the unsharded model of any checkpoint as files for ``from_pretrained``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from safetensors.torch import load_file

from ...errors import CheckpointError
from ..forms.source import Reading, Source
from ..forms.whole import INDEX
from ..read.source import CutRule, once, opened, tensors_of
from ..storage.files import CHUNK, MANIFEST, SILENT, Progress, dumps, naming, sync_dir, write_file
from ..storage.publish import new_beside
from ..storage.tensorfile import Writable, nbytes_of, write_tensors
from ..tensors.stored import ReadPlan

StrPath = str | os.PathLike[str]

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
    rules: Sequence[CutRule] = (),
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
        found, ties = once(tensors_of(source, rules), source.path)
        tensors: Mapping[str, Writable] = found
        if stored_as is not None:
            tensors, ties = stored_as({**found, **{other: found[kept] for other, kept in ties.items()}}), {}
        stem, end = ("pytorch_model", ".bin") if pickled else ("model", ".safetensors")
        files = divided(tensors, max_shard_size, "adapter_model" if adapter else stem, end)
        progress.start(sum(map(nbytes_of, tensors.values())))
        with _new_files(os.fspath(out)) as stage:
            names = write_weights(stage, files, ties, progress)
            names += _copy_model_files(os.fspath(beside or src), stage, os.fspath(out), "adapter_" * adapter)
            sync_dir(stage)
    return names


def write_one(source: Source, out: str, rules: Sequence[CutRule], progress: Progress) -> None:
    """Write the unsharded model in ``source`` as the file ``out``."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} is there already: give another name")
    tensors, ties = once(tensors_of(source, rules), source.path)
    with new_beside(out) as temporary:
        progress.start(sum(map(nbytes_of, tensors.values())))
        write_tensors(temporary, tensors, {"format": "pt", **ties}, progress, summed=False)
        with naming("put in place", out):
            os.rename(temporary, out)
        sync_dir(os.path.dirname(out))


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
        groups[-1][name] = t
        size += nbytes_of(t)
    if len(groups) == 1:
        return {f"{stem}{end}": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}{end}": group for i, group in enumerate(groups, 1)}


def write_weights(
    folder: str, files: Mapping[str, Mapping[str, Writable]], ties: Mapping[str, str], progress: Progress = SILENT
) -> list[str]:
    """Write the tensors of ``files``, and an index of several. Returns the names. ``ties``: further names."""
    for name, group in files.items():
        _write(os.path.join(folder, name), group, {o: kept for o, kept in ties.items() if kept in group}, progress)
    names = list(files)
    if len(names) > 1:
        total = {"total_size": sum(nbytes_of(t) for group in files.values() for t in group.values())}
        weight_map = {t: name for name, group in files.items() for t in group}
        names.append(re.sub(r"-\d+-of-\d+", "", names[0]) + INDEX)
        text = dumps({"metadata": total, "weight_map": weight_map}, indent=2)
        write_file(os.path.join(folder, names[-1]), [text])
    return names


def _write(path: str, tensors: Mapping[str, Writable], ties: Mapping[str, str], progress: Progress) -> None:
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


def _copy_model_files(src: str, stage: str, out: str, kind: str) -> list[str]:
    """Copy what lies beside the weights in ``src`` or its parent: configurations, tokenizer, code."""
    names = []
    for folder, name in _model_files(src, f"{kind}config.json"):
        path = os.path.join(folder, name)
        if not os.path.lexists(os.path.join(out, name.partition(os.sep)[0])):
            with naming("copy", path), open(path, "rb") as f:
                os.makedirs(os.path.dirname(os.path.join(stage, name)), exist_ok=True)
                write_file(os.path.join(stage, name), iter(partial(f.read, CHUNK), b""))
            names.append(name)
    return names


def _model_files(src: str, config: str) -> Iterator[tuple[str, str]]:
    """The folder with the configuration, and the name in it of each file that belongs to the model."""
    for folder in (src, os.path.dirname(os.path.realpath(src))):
        if not os.path.isfile(os.path.join(folder, config)):
            continue
        templates = os.path.join(folder, _TEMPLATES)
        names = os.listdir(folder)
        names += [os.path.join(_TEMPLATES, n) for n in os.listdir(templates)] if os.path.isdir(templates) else []
        for name in sorted(names):
            wanted = not name.startswith(".") and not name.endswith(_NOT_COPIED) and name != MANIFEST
            if wanted and os.path.isfile(os.path.join(folder, name)):
                yield folder, name
        return


@contextmanager
def _new_files(out: str) -> Iterator[str]:
    """A directory to write in. Its files are then moved to ``out``, the index last. CheckpointError if
    ``out`` has files of weights already, or is a checkpoint: the next save there would leave old weights."""
    out = os.path.realpath(out)
    held = os.listdir(out) if os.path.isdir(out) else []
    if MANIFEST in held:
        raise CheckpointError(f"{out} is a checkpoint: give another directory, or a new one inside it")
    for name in sorted(held):
        if name.startswith(("model.", "model-", "pytorch_model")):
            raise CheckpointError(f"{os.path.join(out, name)} is there already: give another directory")
    with new_beside(out) as stage:
        with naming("make the directory", stage):
            os.mkdir(stage)
        yield stage
        with naming("put in place", out):
            if not os.path.isdir(out):
                os.rename(stage, out)
            else:
                for name in sorted(os.listdir(stage), key=lambda n: (n.endswith(INDEX), n)):
                    os.rename(os.path.join(stage, name), os.path.join(out, name))
                sync_dir(out)
        sync_dir(os.path.dirname(out))
