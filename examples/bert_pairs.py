"""BERT's two training tasks: sentence pairs (next sentence prediction) and masked tokens (masked LM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from bert_tokens import CLS, MASK, PAD, SEP, SPECIAL_TOKENS
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # the label of a position that is not predicted
MASKED_SHARE = 0.15
REPLACED_BY_MASK, REPLACED_BY_RANDOM = 0.8, 0.1  # of the masked positions; the rest keep their token

Example = dict[str, Tensor]  # by the argument names of transformers' BertForPreTraining
Key = int | tuple[int, int]  # an index, or (epoch, index)
Sentence = Sequence[int]
Ids = NDArray[np.int64]


class Pair(NamedTuple):
    """``[CLS] a [SEP] b [SEP]`` before padding."""

    a: Ids
    b: Ids
    is_random: bool  # b is from another document, not what follows a


def make_pairs(documents: Sequence[Sequence[Sentence]], *, max_seq_length: int, seed: int) -> list[Pair]:
    """Walk through every document in windows that fill a sequence, and cut each window in two.

    Half of the second parts are exchanged for a run of sentences from another document; the sentences so
    replaced are read again in the next window.
    """
    if len(documents) < 2:
        raise ValueError(f"random next sentences need two or more documents, got {len(documents)}")
    room = max_seq_length - 3  # [CLS], [SEP], [SEP]
    if room < 2:
        raise ValueError(f"max_seq_length={max_seq_length} leaves no room for two sentences: give 5 or more")
    rng = np.random.default_rng(seed)
    pairs = []
    for number, document in enumerate(documents):
        start = 0
        while start + 2 <= len(document):
            stop = max(start + 2, _run(document, start, room))
            cut = int(rng.integers(start + 1, stop))
            a = _join(document[start:cut])
            is_random = bool(rng.random() < 0.5)
            if is_random:
                other = int(rng.integers(len(documents) - 1))
                source = documents[other + (other >= number)]
                first = int(rng.integers(len(source)))
                b = _join(source[first : _run(source, first, room - len(a))])
            else:
                b = _join(document[cut:stop])
            pairs.append(Pair(*_trim(a, b, room, rng), is_random))
            start = cut if is_random else stop
    return pairs


class PairDataset(Dataset[Example]):
    """Pairs as padded examples. Masks are drawn anew in every epoch, from (seed, epoch, index) alone.

    So an example is the same on whatever rank, in whatever order and at whatever restart it is read.
    """

    def __init__(
        self, pairs: Sequence[Pair], *, vocab_size: int, max_seq_length: int, max_predictions: int, seed: int
    ) -> None:
        if max_predictions < 1:
            raise ValueError(f"max_predictions={max_predictions}: at least one token must be predicted")
        self.pairs = pairs
        self.vocab_size = vocab_size
        self.max_seq_length = max_seq_length
        self.max_predictions = max_predictions
        self.seed = seed

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: Key) -> Example:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        a, b, is_random = self.pairs[index]
        ids = np.concatenate(([CLS], a, [SEP], b, [SEP]))
        masked, labels = self._mask(ids, np.random.default_rng((self.seed, epoch, index)))
        second = np.zeros_like(ids)
        second[len(a) + 2 :] = 1
        return {
            "input_ids": self._pad(masked, PAD),
            "attention_mask": self._pad(np.ones_like(ids), 0),
            "token_type_ids": self._pad(second, 0),
            "labels": self._pad(labels, IGNORED),
            "next_sentence_label": torch.tensor(int(is_random)),
        }

    def _mask(self, ids: Ids, rng: np.random.Generator) -> tuple[Ids, Ids]:
        """The ids with some of them replaced, and the labels: the true id where one is to be predicted."""
        candidates = np.flatnonzero((ids != CLS) & (ids != SEP))
        count = min(self.max_predictions, max(1, round(MASKED_SHARE * len(candidates))))
        chosen = rng.choice(candidates, count, replace=False)
        fate = rng.random(count)
        random_ids = rng.integers(len(SPECIAL_TOKENS), self.vocab_size, count)
        kept_or_random = np.where(fate < REPLACED_BY_MASK + REPLACED_BY_RANDOM, random_ids, ids[chosen])
        masked, labels = ids.copy(), np.full_like(ids, IGNORED)
        masked[chosen] = np.where(fate < REPLACED_BY_MASK, MASK, kept_or_random)
        labels[chosen] = ids[chosen]
        return masked, labels

    def _pad(self, values: Ids, filler: int) -> Tensor:
        padded = np.full(self.max_seq_length, filler, dtype=np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded)


def _run(document: Sequence[Sentence], start: int, room: int) -> int:
    """The end of the shortest run of sentences from ``start`` that fills ``room`` tokens, if any does."""
    stop, length = start, 0
    while stop < len(document) and length < room:
        length += len(document[stop])
        stop += 1
    return max(stop, start + 1)


def _join(sentences: Sequence[Sentence]) -> Ids:
    return np.concatenate([np.asarray(sentence, dtype=np.int64) for sentence in sentences])


def _trim(a: Ids, b: Ids, room: int, rng: np.random.Generator) -> tuple[Ids, Ids]:
    """Take single tokens off either end of the longer part until both fit."""
    while len(a) + len(b) > room:
        part = slice(1, None) if rng.random() < 0.5 else slice(None, -1)
        if len(a) > len(b):
            a = a[part]
        else:
            b = b[part]
    return a, b
