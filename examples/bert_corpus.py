"""Where the text comes from: the standard library's reference manual, or the user's own .txt files."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Document = tuple[str, ...]  # sentences in their order

MIN_PARAGRAPH_WORDS = 8  # shorter ones are headings, labels and list entries, not prose
MIN_SENTENCE_WORDS = 4
# A paragraph joins the one before it until a document has this many sentences: dialogue and lists are cut
# into paragraphs of one sentence, which alone can form no sentence pair.
MIN_DOCUMENT_SENTENCES = 5

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"\u201d\u2019')\]]*\s+(?=[\"\u201c\u2018'(\[]?[A-Z0-9])")
_NOT_AN_END = re.compile(r"(?:\b(?:e\.g|i\.e|etc|vs|cf|Mr|Mrs|Ms|Dr|St|No|Fig)|\b[A-Z])\.[\"\u201d\u2019')\]]*$")
_BULLET = re.compile(r"^(?:[*\u2022-]|\d+\.)\s+")
_MARKUP = re.compile(r"\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)|``|\[\d+\]")
_CODE = re.compile(r"::=|>>>|\+--|==[=|]|^\s*(?:def|class|import|return|for|if|while) .*:$", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """Documents with the name they are reported under."""

    name: str
    documents: tuple[Document, ...]

    @cached_property
    def sha256(self) -> str:
        """Of the text itself, so that it also tells two versions of one source apart."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update("\n".join((*document, "", "")).encode())
        return digest.hexdigest()

    @property
    def sentences(self) -> int:
        return sum(len(document) for document in self.documents)

    def describe(self) -> str:
        return f"{self.name}: {len(self.documents)} documents, {self.sentences} sentences, sha256 {self.sha256[:16]}"


def load_corpus(path: Path | None = None) -> Corpus:
    """The embedded reference text, or every .txt file at ``path`` (a file, or a folder searched in depth)."""
    return _embedded() if path is None else _from_files(path)


def split_sentences(paragraph: str) -> list[str]:
    """Split running text at ``. ! ?`` before a capital or a digit, but not after common abbreviations."""
    sentences: list[str] = []
    start = 0
    text = " ".join(paragraph.split())
    for end in _SENTENCE_END.finditer(text):
        if _NOT_AN_END.search(text[start : end.end()].rstrip()):
            continue
        sentences.append(text[start : end.end()].strip())
        start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if len(sentence.split()) >= MIN_SENTENCE_WORDS]


def _embedded() -> Corpus:
    # The language reference that `help()` shows. It differs between Python versions, hence the version in
    # the name and the hash in every report.
    from pydoc_data.topics import topics

    documents = (_document(_prose(topics[name])) for name in sorted(topics))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Corpus(f"language reference of Python {version}", _usable(documents))


def _prose(topic: str) -> Iterator[str]:
    """The paragraphs that are English: without headings, code, grammar, tables and signatures."""
    for block in re.split(r"\n\s*\n", topic):
        text = _MARKUP.sub("", _BULLET.sub("", block.strip()))
        letters = sum(c.isalpha() or c.isspace() for c in text)
        if (
            len(text.split()) >= MIN_PARAGRAPH_WORDS
            and text.rstrip("\"')\u201d")[-1:] in ".!?:"
            and not _CODE.search(text)
            and letters >= 0.85 * len(text)  # code that the patterns miss is full of punctuation
        ):
            yield text


def _document(paragraphs: Iterable[str]) -> Document:
    return tuple(sentence for paragraph in paragraphs for sentence in split_sentences(paragraph))


def _usable(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Those with at least the two sentences that a pair needs."""
    return tuple(document for document in documents if len(document) >= 2)


def _from_files(path: Path) -> Corpus:
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no .txt file under {path}: give a text file, or a folder that holds some")
    if not files[0].exists():
        raise ValueError(f"{path} does not exist")
    documents = _usable(document for file in files for document in _documents(file))
    if len(documents) < 2:
        raise ValueError(
            f"found {len(documents)} document(s) of two or more sentences in {path}, but sentence pairs"
            " need two or more documents: separate documents by blank lines"
        )
    return Corpus(str(path), documents)


def _documents(file: Path) -> Iterator[Document]:
    """Blank lines separate documents, as in BERT's own input; very short ones are joined."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
    pending: Document = ()
    for paragraph in re.split(r"\n\s*\n", text):
        pending += tuple(split_sentences(paragraph))
        if len(pending) >= MIN_DOCUMENT_SENTENCES:
            yield pending
            pending = ()
    if pending:
        yield pending
