"""The data of the BERT example: what is read, how it is paired, masked, stored and ordered."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
import torch
from helpers.places import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import bert_data
import bert_hdf5
import bert_tokens
from bert_corpus import Corpus, load_corpus, split_sentences
from bert_pairs import IGNORED, MASKED_SHARE, PairDataset, make_pairs
from bert_tokens import CLS, MASK, PAD, SEP

VOCAB = 600


def documents(n=40, sentences=12, seed=0):
    """Sentences of 3 to 9 random ids; no two documents share an id, so an id tells its document."""
    rng = np.random.default_rng(seed)
    return [
        [list(rng.integers(5 + d * 14, 5 + (d + 1) * 14, rng.integers(3, 10))) for _ in range(sentences)]
        for d in range(n)
    ]


def dataset(max_predictions=20, seed=3, max_seq_length=48):
    pairs = make_pairs(documents(), max_seq_length=max_seq_length, seed=seed)
    return PairDataset(
        pairs, vocab_size=VOCAB, max_seq_length=max_seq_length, max_predictions=max_predictions, seed=seed
    )


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


class TestCorpus:
    def test_sentences(self):
        text = "It is e.g. an example of this. The next one\nfollows here! (So does this one.) No."
        parts = ["It is e.g. an example of this.", "The next one follows here!", "(So does this one.)"]
        assert split_sentences(text) == parts
        parts = ["Guido van Rossum met J. R. Smith in March.", "They talked about it."]
        assert split_sentences(" ".join(parts)) == parts

    def test_text_files(self, tmp_path):
        first = " ".join(f"This is sentence number {i} of one." for i in range(6))
        second = "\n".join(f"Here is line number {i} of two." for i in range(5))
        (tmp_path / "deep").mkdir()
        (tmp_path / "a.txt").write_text(f"{first}\n\n{second}\n")
        (tmp_path / "deep" / "b.txt").write_text("One small paragraph is here.\n\nAnd another one follows it.\n")
        (tmp_path / "ignored.md").write_text(first)
        corpus = load_corpus(tmp_path)
        assert [len(document) for document in corpus.documents] == [6, 5, 2]
        assert [len(document) for document in load_corpus(tmp_path / "a.txt").documents] == [6, 5]

    def test_errors_say_what_is_missing(self, tmp_path):
        with pytest.raises(ValueError, match=r"no \.txt file"):
            load_corpus(tmp_path)
        with pytest.raises(ValueError, match="does not exist"):
            load_corpus(tmp_path / "none.txt")
        (tmp_path / "a.txt").write_text("There is one sentence here. And there is one more.")
        with pytest.raises(ValueError, match="separate documents by blank lines"):
            load_corpus(tmp_path)
        (tmp_path / "a.txt").write_bytes(b"\xff\xfe latin")
        with pytest.raises(ValueError, match="not UTF-8"):
            load_corpus(tmp_path)


class TestVocabulary:
    def test_cache_is_keyed_by_text_and_size(self, tmp_path):
        corpus = Corpus("small", tuple(load_corpus().documents[:5]))
        first = bert_tokens.cached_tokenizer(corpus, 300, tmp_path)
        (file,) = tmp_path.iterdir()
        written = file.stat().st_mtime_ns
        assert bert_tokens.cached_tokenizer(corpus, 300, tmp_path).get_vocab() == first.get_vocab()
        assert file.stat().st_mtime_ns == written
        bert_tokens.cached_tokenizer(corpus, 301, tmp_path)
        bert_tokens.cached_tokenizer(Corpus("small", corpus.documents[:4]), 300, tmp_path)
        assert len(list(tmp_path.iterdir())) == 3  # and no temporary file


class TestPairs:
    def test_half_are_from_another_document_and_the_label_says_which(self):
        pairs = make_pairs(documents(), max_seq_length=48, seed=3)
        for pair in pairs:
            sources = [{(int(i) - 5) // 14 for i in part} for part in (pair.a, pair.b)]
            assert all(len(source) == 1 for source in sources)
            assert (sources[0] != sources[1]) == pair.is_random
        share = np.mean([pair.is_random for pair in pairs])
        assert abs(share - 0.5) < 3 * 0.5 / np.sqrt(len(pairs))  # three standard deviations

    def test_every_pair_fits(self):
        for length in (5, 17, 64):
            pairs = make_pairs(documents(), max_seq_length=length, seed=1)
            assert all(len(p.a) >= 1 and len(p.b) >= 1 for p in pairs)
            assert max(len(p.a) + len(p.b) + 3 for p in pairs) == length

    def test_errors(self):
        with pytest.raises(ValueError, match="two or more documents, got 1"):
            make_pairs(documents(n=1), max_seq_length=64, seed=0)
        with pytest.raises(ValueError, match="max_seq_length=4 leaves no room"):
            make_pairs(documents(), max_seq_length=4, seed=0)
        with pytest.raises(ValueError, match="max_predictions=0"):
            dataset(max_predictions=0)


class TestMasking:
    def test_layout_of_an_example(self):
        data = dataset()
        for index in range(len(data)):
            pair, example = data.pairs[index], data[index]
            true = torch.where(example["labels"] == IGNORED, example["input_ids"], example["labels"])
            length = len(pair.a) + len(pair.b) + 3
            expected = [CLS, *pair.a, SEP, *pair.b, SEP] + [PAD] * (48 - length)
            assert true.tolist() == expected
            assert example["attention_mask"].tolist() == [1] * length + [0] * (48 - length)
            first = len(pair.a) + 2
            assert example["token_type_ids"].tolist() == [0] * first + [1] * (length - first) + [0] * (48 - length)
            assert example["next_sentence_label"].item() == int(pair.is_random)

    def test_15_percent_in_the_shares_80_10_10(self):
        data = dataset()
        masked = random = kept = 0
        for epoch, index in itertools.product(range(40), range(len(data))):
            example = data[epoch, index]
            chosen = example["labels"] != IGNORED
            true, seen = example["labels"][chosen], example["input_ids"][chosen]
            assert not bool(((true == CLS) | (true == SEP) | (true == PAD)).any())
            masked += int((seen == MASK).sum())
            kept += int((seen == true).sum())
            random += int(((seen != MASK) & (seen != true)).sum())
            assert len(true) == round(0.15 * (len(data.pairs[index].a) + len(data.pairs[index].b)))
        assert MASKED_SHARE == 0.15
        total = masked + random + kept
        assert total > 20_000
        # Three standard deviations of a share of 0.8 (0.1) over 20,000 draws are 0.0085 (0.0064).
        assert masked / total == pytest.approx(0.8, abs=0.0085)
        assert random / total == pytest.approx(0.1, abs=0.0064)
        assert kept / total == pytest.approx(0.1, abs=0.0064)

    def test_masks_depend_on_seed_epoch_and_index_alone(self):
        data = dataset()
        backwards = [data[2, index] for index in reversed(range(len(data)))][::-1]
        for index, example in enumerate(backwards):
            assert_same(example, data[2, index])
        assert not torch.equal(data[0, 0]["labels"], data[1, 0]["labels"])
        assert_same(data[0, 0], data[0])


class TestHdf5:
    def write(self, path, data, max_predictions=20):
        return bert_hdf5.write_shard(path, (data[i] for i in range(len(data))), max_predictions=max_predictions)

    def test_round_trip(self, tmp_path):
        data = dataset()
        n = self.write(tmp_path / "x" / "one.hdf5", data)
        assert self.write(tmp_path / "two.h5", data) == n == len(data)
        shards = bert_hdf5.find_shards(tmp_path)
        read = bert_hdf5.Hdf5Dataset(shards, vocab_size=VOCAB)
        assert len(read) == 2 * n
        for i in range(n):
            assert_same(data[i], read[i])
            assert_same(data[i], read[0, n + i])

    def test_published_layout(self, tmp_path):
        h5py = pytest.importorskip("h5py")
        self.write(tmp_path / "a.hdf5", dataset())
        with h5py.File(tmp_path / "a.hdf5") as file:
            assert {name: (file[name].dtype.name, file[name].shape[1:]) for name in file} == {
                "input_ids": ("int32", (48,)),
                "input_mask": ("int8", (48,)),
                "segment_ids": ("int8", (48,)),
                "masked_lm_positions": ("int32", (20,)),
                "masked_lm_ids": ("int32", (20,)),
                "next_sentence_labels": ("int8", ()),
            }

    def test_errors(self, tmp_path):
        h5py = pytest.importorskip("h5py")
        data = dataset()
        with pytest.raises(ValueError, match="max_predictions=1"):
            self.write(tmp_path / "a.hdf5", data, max_predictions=1)
        self.write(tmp_path / "a.hdf5", data)
        with pytest.raises(ValueError, match=r"outside a vocabulary of 100: .*--vocab_size"):
            bert_hdf5.Hdf5Dataset([tmp_path / "a.hdf5"], vocab_size=100)
        with h5py.File(tmp_path / "a.hdf5", "a") as file:
            del file["segment_ids"]
        with pytest.raises(ValueError, match="has no segment_ids; it holds input_ids"):
            bert_hdf5.Hdf5Dataset([tmp_path / "a.hdf5"], vocab_size=VOCAB)
        (tmp_path / "b.hdf5").write_text("not HDF5")
        with pytest.raises(ValueError, match="cannot be read as HDF5"):
            bert_hdf5.Hdf5Dataset([tmp_path / "b.hdf5"], vocab_size=VOCAB)

    def test_text_converted_to_shards_trains_on_the_same_examples(self, tmp_path, monkeypatch, capsys):
        options = ["--output_dir", str(tmp_path), "--max_seq_length", "64", "--dupe_factor", "2"]
        monkeypatch.setattr(sys, "argv", ["bert_data.py", *options])
        bert_data.main()
        assert "--vocab_size 2048" in capsys.readouterr().out
        settings = {"max_seq_length": 64, "max_predictions": 20, "seed": 12349, "cache": tmp_path}
        text = bert_data.load_data(None, vocab_size=None, **settings)
        shards = bert_data.load_data(tmp_path, vocab_size=2048, **settings)
        assert isinstance(shards.dataset, bert_hdf5.Hdf5Dataset)
        assert len(shards) == 2 * len(text)
        assert_same(shards.dataset[7], text.dataset[0, 7])
        assert_same(shards.dataset[len(text) + 7], text.dataset[1, 7])


class TestBatches:
    def take(self, n, **overrides):
        settings = {"batch_size": 4, "seed": 1, "dp_size": 1, "dp_rank": 0, **overrides}
        return list(itertools.islice(bert_data.batches(dataset(), **settings), n))

    def test_a_later_start_continues_the_same_batches(self):
        per_epoch = len(dataset()) // 4
        n = 2 * per_epoch + 3
        whole = self.take(n)
        for start in (1, per_epoch - 1, per_epoch, per_epoch + 2):
            for expected, got in zip(whole[start:], self.take(n - start, start=start), strict=True):
                assert_same(expected, got)

    def test_data_parallel_ranks_share_out_the_data(self):
        one = self.take(5, dp_size=2, dp_rank=0)
        other = self.take(5, dp_size=2, dp_rank=1)
        mine, theirs = ({tuple(row.tolist()) for b in batches for row in b["labels"]} for batches in (one, other))
        assert not mine & theirs

    def test_too_little_data(self):
        with pytest.raises(ValueError, match="do not fill one batch of 1000"):
            self.take(1, batch_size=1000)


def test_unknown_data_path(tmp_path):
    settings = {"max_seq_length": 64, "max_predictions": 20, "seed": 0, "cache": tmp_path}
    with pytest.raises(ValueError, match=r"--data .*none does not exist"):
        bert_data.load_data(tmp_path / "none", vocab_size=None, **settings)
