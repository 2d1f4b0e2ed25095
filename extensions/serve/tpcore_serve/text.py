"""The text of tokens as they come: what no later token changes is given at once, the rest at the end."""

from __future__ import annotations

from os.path import commonprefix
from textwrap import shorten
from typing import Any

_FEW, _MANY = 8, 32
"""Tokens before the new ones that are decoded again with them, and after how many they are counted anew."""
_CLEANED = 20
"""Characters in which transformers' clean-up of spaces, ten replacements after one another, reaches back."""
_NO_CHARACTER = "\ufffd"


def tokenizer_of(folder: str) -> Any:
    """The tokenizer beside a model. ValueError if none opens."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as e:  # noqa: BLE001  each tokenizer has errors of its own
        why = shorten(str(e), 120, placeholder=" ...") or type(e).__name__
        raise ValueError(f"no tokenizer opens: tokenizer.save_pretrained({folder!r}) ({why})") from None


class Text:
    """Its pieces are together what ``tokenizer.decode`` says of all tokens, with ``before`` in front of them."""

    def __init__(self, tokenizer: Any, before: list[int], special: bool) -> None:
        """``special``: whether special tokens are text."""
        self._tokenizer, self._special = tokenizer, special
        breaks = tokenizer.convert_tokens_to_ids("<0xFF>")  # no character has this byte
        self._breaks = None if breaks == tokenizer.unk_token_id else breaks
        plain = (
            not tokenizer.clean_up_tokenization_spaces
            or self._decoded(tokenizer.encode("a .", add_special_tokens=False)) == "a ."
        )
        self._held = 0 if plain else _CLEANED
        # characters whose bytes are tokens end with the prompt: those of the answer do not change them
        end = next((n for n in range(len(before), 0, -1) if self._whole(before[n - 1])), 0)
        self._tokens = self._last(before[:end])
        self._shown = len(self._decoded(self._tokens))
        self._given = 0
        self.length = 0
        """Characters of the tokens so far; bytes that are no character yet are none."""

    def add(self, token: int) -> str:
        """The text that is certain with ``token`` and was not before."""
        self._tokens.append(token)
        text, certain = self._certain(self._tokens)
        new = text[self._shown : certain - self._held]
        self._shown += len(new)
        self._given += len(new)
        self.length = self._given + max(0, certain - self._shown)
        if len(self._tokens) > _MANY and self._shown + self._held == len(text):
            self._tokens = self._last(self._tokens)
            self._shown = len(self._decoded(self._tokens)) - self._held
        return new

    def rest(self) -> str:
        """The text that is not certain yet, when no token comes any more."""
        return self._decoded(self._tokens)[self._shown :]

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not self._special))

    def _certain(self, tokens: list[int]) -> tuple[str, int]:
        """Their text, and how much of it stands whatever comes: bytes are held until they are known to be whole."""
        text = self._decoded(tokens)
        other = text if self._breaks is None else self._decoded([*tokens, self._breaks])
        return text, len(commonprefix([text, other]).rstrip(_NO_CHARACTER))  # noqa: RUF071  of texts, not of paths

    def _whole(self, token: int) -> bool:
        text, certain = self._certain([token])
        return certain == len(text)

    def _last(self, tokens: list[int]) -> list[int]:
        """The last tokens, so many that they have a text: what begins one is decoded in another way."""
        count = _FEW
        while count < len(tokens) and len(self._decoded(tokens[-count:])) <= 2 * self._held:
            count *= 2
        return tokens[-count:]
