"""Pretraining data for BERT, from text or from HDF5 shards; run as a program it turns text into shards."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from bert_corpus import load_corpus
from bert_hdf5 import Hdf5Dataset, find_shards, write_shard
from bert_pairs import Example, PairDataset, make_pairs
from bert_tokens import cached_tokenizer, encode
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

TEXT_VOCAB_SIZE = 2048
SHARD_VOCAB_SIZE = 30522  # the uncased vocabulary that the published shards are written with


@dataclass(frozen=True)
class PretrainingData:
    dataset: Hdf5Dataset | PairDataset
    vocab_size: int
    max_seq_length: int
    description: str
    sha256: str  # of what the examples are made from

    def __len__(self) -> int:
        return len(self.dataset)


def load_data(
    path: Path | None, *, vocab_size: int | None, max_seq_length: int, max_predictions: int, seed: int, cache: Path
) -> PretrainingData:
    """From HDF5 shards where ``path`` holds some, else from text; None is the embedded reference text.

    ``cache`` is the folder that keeps the trained vocabulary. Shards carry their own sequence length and
    masks, so the options of that name do not apply to them.
    """
    if path is not None and not path.exists():
        raise ValueError(f"--data {path} does not exist")
    shards = [] if path is None else find_shards(path)
    if shards:
        return _from_shards(shards, vocab_size or SHARD_VOCAB_SIZE)
    corpus = load_corpus(path)
    tokenizer = cached_tokenizer(corpus, vocab_size or TEXT_VOCAB_SIZE, cache)
    pairs = make_pairs(encode(tokenizer, corpus), max_seq_length=max_seq_length, seed=seed)
    size = tokenizer.get_vocab_size()
    dataset = PairDataset(
        pairs, vocab_size=size, max_seq_length=max_seq_length, max_predictions=max_predictions, seed=seed
    )
    return PretrainingData(dataset, size, max_seq_length, corpus.describe(), corpus.sha256)


def _from_shards(files: list[Path], vocab_size: int) -> PretrainingData:
    dataset = Hdf5Dataset(files, vocab_size=vocab_size)
    digest = hashlib.sha256()
    for column in dataset.columns.values():
        digest.update(column.tobytes())
    description = f"{len(files)} HDF5 shards, sha256 {digest.hexdigest()[:16]}"
    return PretrainingData(dataset, vocab_size, dataset.max_seq_length, description, digest.hexdigest())


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """Batches of ``(epoch, index)`` keys without end, from batch number ``start`` on.

    Batch n is the same wherever the iteration began, which is what lets a resumed run go on with the data
    that it would have seen. The last, incomplete batch of an epoch is dropped.
    """

    def __init__(self, sampler: DistributedSampler[int], batch_size: int, start: int = 0) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.start = start
        self.per_epoch = len(sampler) // batch_size
        if not self.per_epoch:
            raise ValueError(
                f"{len(sampler)} sequences for each data-parallel rank do not fill one batch of {batch_size}:"
                " give more data or a smaller --batch_size"
            )

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, first = divmod(self.start, self.per_epoch)
        while True:
            self.sampler.set_epoch(epoch)
            indices = list(self.sampler)
            for n in range(first, self.per_epoch):
                batch = indices[n * self.batch_size : (n + 1) * self.batch_size]
                yield [(epoch, index) for index in batch]
            epoch, first = epoch + 1, 0


def batches(
    dataset: Dataset[Example], *, batch_size: int, seed: int, dp_size: int, dp_rank: int, start: int = 0
) -> Iterator[Example]:
    """This data-parallel rank's micro-batches without end, from number ``start`` on."""
    # drop_last: without it the sampler repeats examples until all ranks have as many
    sampler: DistributedSampler[int] = DistributedSampler(
        dataset, dp_size, dp_rank, shuffle=True, seed=seed, drop_last=True
    )
    # The loader draws a seed for its workers when the iteration begins. From torch's default generator,
    # that draw would shift the dropout of a resumed run.
    generator = torch.Generator().manual_seed(seed)
    return iter(DataLoader(dataset, batch_sampler=EpochBatches(sampler, batch_size, start), generator=generator))


def convert(arguments: argparse.Namespace) -> None:
    """Write text as HDF5 shards, one for each epoch of masks, and its vocabulary beside them."""
    data = load_data(
        arguments.data,
        vocab_size=arguments.vocab_size,
        max_seq_length=arguments.max_seq_length,
        max_predictions=arguments.max_predictions,
        seed=arguments.seed,
        cache=arguments.output_dir,
    )
    if isinstance(data.dataset, Hdf5Dataset):
        raise SystemExit(f"{arguments.data} already holds HDF5 shards")
    print(data.description)
    for epoch in range(arguments.dupe_factor):
        path = arguments.output_dir / f"pretraining_{epoch:04d}.hdf5"
        examples = (data.dataset[epoch, index] for index in range(len(data)))
        rows = write_shard(path, examples, max_predictions=arguments.max_predictions)
        print(f"{path}: {rows} sequences; train on them with --vocab_size {data.vocab_size}")


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options that decide what the examples are; shared with the training script."""
    parser.add_argument(
        "--data",
        type=Path,
        help="a .txt file, a folder of them, or HDF5 shards; default: the language reference inside Python",
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        help=f"of the vocabulary trained on text (default {TEXT_VOCAB_SIZE}), or that shards were written"
        f" with (default {SHARD_VOCAB_SIZE})",
    )
    parser.add_argument("--max_seq_length", type=int, default=128, help="tokens in a pair (text only)")
    parser.add_argument("--max_predictions", type=int, default=20, help="masked tokens at most (text only)")
    parser.add_argument("--seed", type=int, default=12349)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Turn text into HDF5 shards, one for each epoch of masks.", allow_abbrev=False
    )
    add_data_options(parser)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--dupe_factor", type=int, default=5, help="times that each pair is masked anew")
    convert(parser.parse_args())


if __name__ == "__main__":
    main()
