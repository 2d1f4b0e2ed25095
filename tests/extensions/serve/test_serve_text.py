"""The text of answers is what the tokenizer says of all their tokens, whatever the tokenizer, however it comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from tpcore_serve.batches import Stream
from tpcore_serve.sampling import Likelihood, Names, of_chat, of_completion
from tpcore_serve.text import Text

SPECIAL, END = "<s>", "<end>"
PIECES = ["▁", "▁a", "b", "▁b", "é", "▁.", ".", "▁n", "'t", "▁'", "\n", "\ufffd", "##b", "a", ",", "▁n't", "x" * 30]


def fast(model: Any, decoder: Any, pre_tokenizer: Any = None, **options: Any) -> Any:
    text = Tokenizer(model)
    text.decoder = decoder
    if pre_tokenizer is not None:
        text.pre_tokenizer = pre_tokenizer
    text.add_special_tokens([AddedToken(SPECIAL, special=True)])
    text.add_tokens([AddedToken(END, special=False)])  # an end token that is not special
    return transformers.PreTrainedTokenizerFast(tokenizer_object=text, bos_token=SPECIAL, **options)


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}


BYTES = [f"<0x{i:02X}>" for i in range(256)]
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
WORDS = numbered([piece.replace("▁", "") or "<unk>" for piece in PIECES])
TOKENIZERS = {
    "bytes": fast(models.BPE(numbered(sorted(pre_tokenizers.ByteLevel.alphabet())), []), decoders.ByteLevel()),
    "fallback, first space stripped": fast(models.BPE(numbered([*BYTES, *PIECES]), [], byte_fallback=True), LLAMA),
    "fallback": fast(models.BPE(numbered([*BYTES, *PIECES]), [], byte_fallback=True), GEMMA),
    "metaspace": fast(models.BPE(numbered(PIECES), []), decoders.Metaspace()),
    "word pieces": fast(models.WordPiece(WORDS, unk_token="<unk>"), decoders.WordPiece(cleanup=True)),
    "words, cleaned": fast(models.WordLevel(WORDS, unk_token="<unk>"), None, clean_up_tokenization_spaces=True),
    "ends of words": fast(models.BPE(numbered(["a", "b</w>", "a</w>", "."]), []), decoders.BPEDecoder(suffix="</w>")),
}


def answered(
    tokenizer: Any, prompt: list[int], tokens: list[int], steps: list[int], **options: Any
) -> tuple[list[str], list[int]]:
    """The pieces of a stream whose engine gives ``tokens`` in ``steps``, and those that were taken."""
    ends = tokenizer.convert_tokens_to_ids(END)
    config = transformers.GenerationConfig(max_new_tokens=len(tokens), eos_token_id=[ends], **options)
    engine: Any = SimpleNamespace(cancel_request=lambda _: None, output_router=OutputRouter())
    queue: asyncio.Queue[Any] = asyncio.Queue()
    stream = Stream(engine, "one", Text(tokenizer, prompt, special=False), None, queue, config=config, totals=Counter())
    for n in sorted({*steps, len(tokens)}):
        status = RequestStatus.FINISHED if n >= len(tokens) else RequestStatus.DECODING
        stream.take(GenerationOutput("one", generated_tokens=tokens[:n], status=status))
    pieces = [queue.get_nowait() for _ in range(queue.qsize())]
    assert pieces.pop() is None
    return pieces, stream.tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_are_together_what_the_tokenizer_says_of_all(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = st.integers(0, len(tokenizer) - 2)
    # runs of few tokens, that characters of several bytes and whole sequences of them come to be
    chosen = st.lists(ids, min_size=1, max_size=6).flatmap(lambda few: st.lists(st.sampled_from(few), max_size=100))
    heads = [0xF0, 0xC3, 0xA9, 0xA9, 0x41] if len(tokenizer) > 256 else [0]
    prompt = data.draw(st.lists(ids, max_size=20))
    tokens = data.draw(st.one_of(chosen, st.lists(ids, max_size=60), st.lists(st.sampled_from(heads), max_size=80)))
    steps = data.draw(st.lists(st.integers(1, len(tokens) + 1), max_size=len(tokens)))
    ended = data.draw(st.booleans()) or not tokens
    given = [*tokens, tokenizer.convert_tokens_to_ids(END)] if ended else tokens
    alone = tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(answered(tokenizer, [], given, steps)[0]) == alone
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    both = tokenizer.decode(prompt + tokens, skip_special_tokens=True)
    continued = "".join(answered(tokenizer, prompt, given, steps)[0])
    # a prompt of whole characters, which no bytes of an answer undo
    if both.startswith(before) and not before.endswith("\ufffd"):
        assert continued == both[len(before) :]
    stops = data.draw(st.lists(st.text("ab. é", min_size=1, max_size=3), min_size=1, max_size=2))
    pieces, taken = answered(tokenizer, prompt, given, steps, stop_strings=stops)
    first = min((i for stop in stops if (i := continued.find(stop)) >= 0), default=len(continued))
    assert "".join(pieces) == continued[:first]
    assert given[: len(taken)] == taken


def ids(tokenizer: Any, *pieces: str) -> list[int]:
    return [int(i) for i in tokenizer.convert_tokens_to_ids(list(pieces))]


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["▁a"], ["▁b", "▁a"], " b a"),  # the first space
        ([], ["<0xC3>", "<0xA9>", "<0xC3>"], "\ufffd" * 3),  # bytes that are no text after valid ones
        ([], ["▁a", "<0xF0>", "<0x9F>"], "a\ufffd\ufffd"),  # cut inside a character
        (["<0xC3>", "<0xA9>"], ["<0xA9>", "b"], "\ufffdb"),  # the prompt's last character stays
        (["▁a", *["<s>"] * 40], ["▁b"], " b"),  # what begins the text is further back
    ],
)
def test_faults_of_other_decoders(prompt: list[str], answer: list[str], text: str) -> None:
    tokenizer = TOKENIZERS["fallback, first space stripped"]
    pieces, _ = answered(tokenizer, ids(tokenizer, *prompt), ids(tokenizer, *answer), [*range(1, len(answer))])
    assert "".join(pieces) == text


@pytest.mark.parametrize("name", ["fallback", "metaspace"])
def test_text_comes_with_its_tokens(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = Text(tokenizer, ids(tokenizer, "▁a"), special=False)
    assert [text.add(token) for token in ids(tokenizer, "▁b", "▁a", "b")] == [" b", " a", "b"]


def test_names_are_texts_bytes_or_numbers() -> None:
    llama, level = TOKENIZERS["fallback, first space stripped"], TOKENIZERS["bytes"]
    of = Names(llama).of
    assert [of(i) for i in ids(llama, "▁a", "a", "<0xC3>", "<s>", "é")] == [" a", "a", "bytes:\\xc3", "<s>", "é"]
    assert of(10_000) == "token_id:10000"
    assert Names(level).of(level.convert_tokens_to_ids("Ã")) == "bytes:\\xc3"
    # another token of the same text, and one that no logarithm has
    a, other, far = ids(llama, "a", "<0x61>", "b")
    entry = Names(llama).entry(7, (a, -2.0, [(other, -1.0), (a, -2.0), (far, float("-inf"))]))
    assert entry == Likelihood("a", 7, -2.0, [(f"token_id:{other}", -1.0), ("a", -2.0), ("b", -9999.0)])
    assert of_completion([entry])["top_logprobs"] == [{f"token_id:{other}": -1.0, "a": -2.0, "b": -9999.0}]
    assert of_chat([Likelihood("bytes:\\xc3\\xa9", 0, -1.0, [])])["content"][0]["bytes"] == [0xC3, 0xA9]
