"""A WordPiece vocabulary trained on the corpus itself: the same one in every process, cached on disk."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bert_corpus import Corpus
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

PAD, UNK, CLS, SEP, MASK = range(5)  # the ids that training gives to SPECIAL_TOKENS
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_ALPHABET = 1000  # characters that get a token of their own; the rarer ones become [UNK]


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """At most ``vocab_size`` lower-case WordPiece tokens; fewer where the text does not yield as many."""
    first, inner = _alphabet(corpus)
    trained = _tokenizer(WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(
        _sentences(corpus),
        WordPieceTrainer(
            vocab_size=vocab_size,
            # The trainer numbers the "##x" characters in the order of a randomised hash map, and breaks
            # ties between merges by those numbers: seen, six trainings on one text gave six orders and two
            # different vocabularies. Named here in a fixed order, twelve trainings gave one.
            special_tokens=SPECIAL_TOKENS + [f"##{c}" for c in inner],
            initial_alphabet=first,
            limit_alphabet=len(first),
            show_progress=False,
        ),
    )
    # Built again from the vocabulary alone: in the trained one "##x" would be special tokens.
    tokenizer = _tokenizer(WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def cached_tokenizer(corpus: Corpus, vocab_size: int, folder: Path) -> Tokenizer:
    """The tokenizer of this text and size from ``folder``, trained and written there when it is missing.

    Ranks need no agreement on who trains: all would train the same one, and the rename is atomic.
    """
    path = folder / f"wordpiece-{vocab_size}-{corpus.sha256[:16]}.json"
    if not path.exists():
        _write_atomically(path, train_tokenizer(corpus, vocab_size).to_str())
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, corpus: Corpus) -> list[list[list[int]]]:
    """Token ids of every sentence of every document; sentences that yield none are left out."""
    documents = []
    for document in corpus.documents:
        encodings = tokenizer.encode_batch_fast(list(document), add_special_tokens=False)
        documents.append([encoding.ids for encoding in encodings if encoding.ids])
    return documents


def _tokenizer(model: WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    return tokenizer


def _sentences(corpus: Corpus) -> Iterator[str]:
    return (sentence for document in corpus.documents for sentence in document)


def _alphabet(corpus: Corpus) -> tuple[list[str], list[str]]:
    """The commonest characters in the corpus, and those of them that occur inside words; both sorted."""
    normalizer, splitter = BertNormalizer(lowercase=True), BertPreTokenizer()
    words: Counter[str] = Counter()
    for sentence in _sentences(corpus):
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    counts: Counter[str] = Counter()
    for word, n in words.items():
        for character in word:
            counts[character] += n
    common = sorted(sorted(counts), key=lambda c: -counts[c])[:MAX_ALPHABET]
    inner = set().union(*(word[1:] for word in words)) & set(common)
    return sorted(common), sorted(inner)


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")  # ranks may write at the same time
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
