"""What a traced model's owner and its processes say to each other, over a socket of each.

Most calls say what the call before said. So what was once made into bytes, or out of them, is kept: after a
forward that has emptied the caches, the few microseconds that JSON takes are fifty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from functools import lru_cache
from struct import Struct
from typing import Any

_SIZE = Struct("<Q")
_HEAD = Struct("<?d")
_CHUNK = 1 << 12


@lru_cache(16)
def request(do: str, **arguments: Hashable) -> bytes:
    return _framed(json.dumps([do, arguments]).encode())


@lru_cache(16)
def requested(data: bytes) -> tuple[str, dict[str, Any]]:
    """The name and the arguments, which are nobody's to change."""
    do, arguments = json.loads(data)
    return do, arguments


def answer(value: Hashable, seconds: float = 0.0) -> bytes:
    return _framed(_HEAD.pack(True, seconds) + _said(value))


def failure(packed: bytes) -> bytes:
    return _framed(_HEAD.pack(False, 0.0) + packed)


def answered(data: bytes) -> tuple[bool, float, bytes]:
    """Whether it went well, seconds, and what ``value_of`` or ``unpack_outcome`` reads."""
    well, seconds = _HEAD.unpack_from(data)
    return well, seconds, data[_HEAD.size :]


@lru_cache(16)
def _said(value: Hashable) -> bytes:
    return json.dumps(value).encode()


@lru_cache(16)
def value_of(data: bytes) -> Any:
    """The value, with lists for tuples, which is nobody's to change."""
    return json.loads(data)


# -- a message and its size, so that one system call is enough for most -------------------------------------
def _framed(data: bytes) -> bytes:
    return _SIZE.pack(len(data)) + data


def send(fd: int, message: bytes) -> None:
    sent = os.write(fd, message)
    while sent < len(message):
        sent += os.write(fd, message[sent:])


def receive(fd: int) -> bytes:
    """The next message; nothing may come after it before it is answered. EOFError at the end."""
    data = os.read(fd, _CHUNK)
    while len(data) < _SIZE.size or len(data) < _SIZE.size + _SIZE.unpack_from(data)[0]:
        more = os.read(fd, _CHUNK)
        if not more:
            raise EOFError
        data += more
    return data[_SIZE.size :]
