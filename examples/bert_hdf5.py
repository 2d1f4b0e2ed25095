"""The HDF5 layout in which NVIDIA's and AWS's BERT tutorials ship their pretraining data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bert_pairs import IGNORED, Example, Key
from numpy.typing import NDArray
from torch.utils.data import Dataset

# name -> dtype of the published files; all but the last have one row per sequence and one column per position
COLUMNS = {
    "input_ids": np.int32,
    "input_mask": np.int8,
    "segment_ids": np.int8,
    "masked_lm_positions": np.int32,
    "masked_lm_ids": np.int32,
    "next_sentence_labels": np.int8,
}
SUFFIXES = (".h5", ".hdf5")

Columns = dict[str, NDArray[Any]]


def find_shards(path: Path) -> list[Path]:
    """The HDF5 files at ``path``: a file, or those in a folder, searched in depth. None: not HDF5 data."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.suffix in SUFFIXES and file.is_file()]


def write_shard(path: Path, examples: Iterable[Example], *, max_predictions: int) -> int:
    """Write ``examples`` as one shard and return how many they were."""
    h5py = _h5py()
    rows = [_to_row(example, max_predictions) for example in examples]
    if not rows:
        raise ValueError(f"no examples to write to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, dtype in COLUMNS.items():
            file.create_dataset(name, data=np.stack([row[name] for row in rows]), dtype=dtype, compression="gzip")
    return len(rows)


class Hdf5Dataset(Dataset[Example]):
    """Every sequence of the shards, with the masks that were drawn when they were written.

    All shards are held in memory in the width of the files: about 1 KB for a sequence of 128 tokens.
    """

    def __init__(self, files: list[Path], *, vocab_size: int) -> None:
        shards = [_read_shard(file) for file in files]
        for name in COLUMNS:
            widths = {shard[name].shape[1:] for shard in shards}
            if len(widths) > 1:
                raise ValueError(f"the shards differ in the width of {name!r}: {sorted(widths)}")
        self.columns = {name: np.concatenate([shard[name] for shard in shards]) for name in COLUMNS}
        largest = max(int(self.columns[name].max()) for name in ("input_ids", "masked_lm_ids"))
        if largest >= vocab_size:
            raise ValueError(
                f"token id {largest} in {files[0].parent} is outside a vocabulary of {vocab_size}:"
                " give the size that the shards were written for with --vocab_size"
            )

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    @property
    def max_seq_length(self) -> int:
        return int(self.columns["input_ids"].shape[1])

    def __getitem__(self, key: Key) -> Example:
        index = key[1] if isinstance(key, tuple) else key
        row = {name: column[index].astype(np.int64) for name, column in self.columns.items()}
        # Unused columns are zero: position 0 holds [CLS], which is never masked.
        used = row["masked_lm_positions"] > 0
        labels = np.full_like(row["input_ids"], IGNORED)
        labels[row["masked_lm_positions"][used]] = row["masked_lm_ids"][used]
        return {
            "input_ids": torch.from_numpy(row["input_ids"]),
            "attention_mask": torch.from_numpy(row["input_mask"]),
            "token_type_ids": torch.from_numpy(row["segment_ids"]),
            "labels": torch.from_numpy(labels),
            "next_sentence_label": torch.tensor(int(row["next_sentence_labels"])),
        }


def _to_row(example: Example, max_predictions: int) -> Columns:
    labels = example["labels"].numpy()
    positions = np.flatnonzero(labels != IGNORED)
    if len(positions) > max_predictions:
        raise ValueError(f"{len(positions)} masked tokens in an example, but max_predictions={max_predictions}")
    padding = (0, max_predictions - len(positions))
    return {
        "input_ids": example["input_ids"].numpy(),
        "input_mask": example["attention_mask"].numpy(),
        "segment_ids": example["token_type_ids"].numpy(),
        "masked_lm_positions": np.pad(positions, padding),
        "masked_lm_ids": np.pad(labels[positions], padding),
        "next_sentence_labels": example["next_sentence_label"].numpy(),
    }


def _read_shard(path: Path) -> Columns:
    h5py = _h5py()
    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in COLUMNS if name not in file]
            if missing:
                raise ValueError(f"{path} has no {', '.join(missing)}; it holds {', '.join(sorted(file))}")
            shard = {name: file[name][:] for name in COLUMNS}
    except OSError as error:
        raise ValueError(f"{path} cannot be read as HDF5: {error}") from error
    lengths = {name: len(column) for name, column in shard.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of {path} differ in length: {lengths}")
    return shard


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise ImportError("HDF5 data needs h5py: pip install 'tpcore[examples]'") from error
    return h5py
