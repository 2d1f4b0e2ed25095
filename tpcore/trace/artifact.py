"""A traced model on disk: programs, weights per rank, and a manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint.manifest import rank_dir, typed
from ..checkpoint.storage.files import CHUNK, LARGEST, MANIFEST, crc32_of, damage, dumps, loads, read_file
from ..checkpoint.storage.tensorfile import TensorFile, dtype_name, dtype_of, write_tensors
from ..checkpoint.write.snapshot import StateTensor
from ..errors import CheckpointError
from ..layout.shard import ShardSpec
from .inputs import DynamicShape, Inputs, Structure

FORMAT = "tpcore.trace"
VERSION = 1
PROGRAMS = "programs"
WEIGHTS = "model.safetensors"


class TracedFile(NamedTuple):
    """``checksum``: sha256 for a program, because it is code; crc32 for weights, computed while writing."""

    size: int
    checksum: str


class Weight(NamedTuple):
    """``others``: further names of the tensor, if tied. ``saved``: whether the model's state_dict has it."""

    spec: ShardSpec
    dtype: torch.dtype
    others: tuple[str, ...] = ()
    saved: bool = True


class OutputSpec(NamedTuple):
    """``shapes``: sizes and names of dims, with the inputs' names for dims that a bucket pads. ``state``: the
    program returns further outputs after those of ``form``, which become these weights for the next call."""

    form: Structure
    shapes: tuple[DynamicShape, ...]
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceManifest:
    """Keys of ``files``: paths relative to the directory, with forward slashes. ``save_id``: also in the header of each
    file of weights."""

    backend: str
    tp: int
    inputs: Inputs
    outputs: OutputSpec
    pad_value: Mapping[str, float]
    weights: Mapping[str, Weight]
    files: Mapping[str, TracedFile]
    written_by: Mapping[str, str]
    save_id: str

    @property
    def programs(self) -> int:
        return max(1, len(self.inputs.buckets))

    def to_json(self) -> bytes:
        head = {"format": FORMAT, "version": VERSION, "save_id": self.save_id, "backend": self.backend, "tp": self.tp}
        model = {
            "inputs": self.inputs.to_json(),
            "pad_value": self.pad_value,
            "outputs": self.outputs._asdict(),
            "weights": {
                name: w.spec.to_json() | {"dtype": dtype_name(w.dtype), "others": w.others, "saved": w.saved}
                for name, w in self.weights.items()
            },
            "files": {p: {"bytes": f.size, "checksum": f.checksum} for p, f in sorted(self.files.items())},
            "written_by": self.written_by,
        }
        return dumps(head | model, indent=1)

    @classmethod
    def from_json(cls, data: bytes, path: str) -> TraceManifest:
        """CheckpointError, naming ``path``, for anything that is not a manifest of this version."""
        top = loads(data, path)
        if not isinstance(top, dict) or top.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not of a traced model (format {FORMAT!r})")
        if top.get("version") != VERSION:
            raise CheckpointError(
                f"{path} is of format version {top.get('version')!r}, this tpcore reads version {VERSION}: "
                "use the tpcore that wrote it, or trace the model again"
            )
        with damage(path):
            if (tp := typed(int, top["tp"])) < 1:
                raise ValueError(f"tp={tp}, and a model has 1 rank or more")
            out = top["outputs"]
            return cls(
                str(top["backend"]),
                tp,
                Inputs.from_json(top["inputs"]),
                OutputSpec(out["form"], tuple(tuple(s) for s in out["shapes"]), tuple(out["state"])),
                dict(top["pad_value"]),
                {
                    name: Weight(ShardSpec.from_json(w), dtype_of(w["dtype"]), tuple(w["others"]), bool(w["saved"]))
                    for name, w in top["weights"].items()
                },
                {name: TracedFile(typed(int, f["bytes"]), str(f["checksum"])) for name, f in top["files"].items()},
                dict(top["written_by"]),
                str(top["save_id"]),
            )


def write_weights(folder: Path, rank: int, weights: Mapping[str, Tensor], save_id: str) -> TracedFile:
    path, metadata = weights_file(folder, rank), {"format": "pt", "save_id": save_id, "rank": rank_dir(rank)}
    path.parent.mkdir()
    record, _ = write_tensors(str(path), {name: StateTensor(t) for name, t in weights.items()}, metadata)
    return TracedFile(record.size, f"crc32:{record.crc32}")


def read_weights(folder: Path, rank: int, manifest: TraceManifest) -> dict[str, Tensor]:
    """The weights of one rank, mapped: only bytes that are used are read from disk. Those that all ranks have are
    mapped from the first rank's file, so the host holds them once. CheckpointError if names or shapes are not those
    of the manifest."""
    path = weights_file(folder, rank)
    weights = load_file(path)
    same = {name for name, weight in manifest.weights.items() if weight.spec.dim is None} & weights.keys()
    # a mapping of their own for the first rank too, so that that of the others can end
    weights |= {name: t for name, t in load_file(weights_file(folder, 0)).items() if name in same}
    for name, weight in manifest.weights.items():
        if name not in weights:
            raise CheckpointError(f"{path} has no {name!r}")
        t = weights[name]
        if t.dtype != weight.dtype:  # a dtype that safetensors has no name for is U8 with one more dim
            weights[name] = t = t.view(weight.dtype).squeeze(-1)
        wanted = weight.spec.local_shape(manifest.tp)
        if tuple(t.shape) != wanted:
            raise CheckpointError(f"{path}: {name!r} has shape {tuple(t.shape)}, the manifest says {wanted}")
    return {name: weights[name] for name in manifest.weights}


def weights_file(folder: Path, rank: int) -> Path:
    return folder / rank_dir(rank) / WEIGHTS


def program_dir(folder: Path, number: int) -> Path:
    return folder / PROGRAMS / str(number)


def record_of(path: Path) -> TracedFile:
    if path.name == WEIGHTS:
        return TracedFile(path.stat().st_size, f"crc32:{crc32_of(str(path))}")
    checksum = hashlib.sha256()
    with path.open("rb") as f:
        while chunk := f.read(CHUNK):
            checksum.update(chunk)
    return TracedFile(path.stat().st_size, f"sha256:{checksum.hexdigest()}")


def opened(folder: Path, *, verify: bool = False) -> TraceManifest:
    """The manifest of a traced model, after a check that all its files are present, whole and its own. Checksums of
    programs are always compared, because a program is code; those of weights if ``verify``, which reads all of them.
    CheckpointError names the file and its fault."""
    path = folder / MANIFEST
    if not path.is_file():
        makes = "parallel_model_trace makes one and parallel_model_save writes it"
        raise CheckpointError(f"{folder} is not a traced model: it has no {MANIFEST}; {makes}")
    manifest = TraceManifest.from_json(read_file(str(path)), str(path))
    for rank in range(manifest.tp):
        name = f"{rank_dir(rank)}/{WEIGHTS}"
        if name not in manifest.files or not (folder / name).is_file():
            raise CheckpointError(f"{folder}: {name} is missing, and tp={manifest.tp} needs one per rank")
    for name, record in manifest.files.items():
        _check_file(folder, name, record, manifest.save_id, verify)
    return manifest


def _check_file(folder: Path, name: str, record: TracedFile, save_id: str, verify: bool) -> None:
    if os.path.isabs(name) or ".." in name.split("/"):
        raise CheckpointError(f"{folder / MANIFEST} names {name!r}, which is not a file in {folder}")
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {MANIFEST} names it")
    size, wanted = path.stat().st_size, (path.parent.name, save_id)
    written: tuple[str | None, str | None] = wanted
    if size != record.size:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes and was written with {record.size}")
    if name.endswith(".safetensors"):
        file = TensorFile(str(path))  # before the checksum: a damaged header needs no more bytes
        file.close()
        if path.name == WEIGHTS:  # of another rank or save only the header differs, not size and tensors
            written = file.metadata.get("rank"), file.metadata.get("save_id")
    elif name.endswith(".json") and size > LARGEST:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, more than the limit of {LARGEST}")
    if (verify or name.startswith(PROGRAMS)) and record_of(path) != record:
        raise CheckpointError(f"{path} is not the file that was written: its checksum differs")
    if written != wanted:
        raise CheckpointError(
            f"{path} is of {written[0]!r} in save {written[1]!r}, and here belongs {path.parent.name!r} of save "
            f"{save_id!r}: files of several ranks or saves were mixed up"
        )
