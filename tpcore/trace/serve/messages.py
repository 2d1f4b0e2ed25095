"""What a traced model's owner and its processes say to each other, over two pipes for each.

After a forward that has emptied the caches, every line of Python costs ten times what it costs in a loop. So
what calls say over and over is handed on as bytes, and made or read anew only where it changes; and to read
from a pipe takes 18 us then, from a socket 30.
"""

from __future__ import annotations

import json
import os
from struct import Struct
from typing import Any

_SIZE = Struct("<Q")
_ANSWER = Struct("<Q?d")
_CHUNK = 1 << 12


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def value_of(data: bytes) -> Any:
    """The value, with lists for tuples."""
    return json.loads(data)


def request(do: str, **arguments: Any) -> bytes:
    data = encoded([do, arguments])
    return _SIZE.pack(len(data)) + data


def requested(fd: int) -> bytes:
    """The next request, of which ``value_of`` makes the name and the arguments. EOFError at the end."""
    return _whole(fd, os.read(fd, _CHUNK))[_SIZE.size :]


def answer(well: bool, data: bytes, seconds: float = 0.0) -> bytes:
    """``data``: of ``encoded`` if it went well, else of ``pack_outcome``."""
    return _ANSWER.pack(_ANSWER.size - _SIZE.size + len(data), well, seconds) + data


def answered(fd: int) -> tuple[bool, bytes, float]:
    """What ``answer`` was given. EOFError at the end."""
    message = _whole(fd, os.read(fd, _CHUNK))
    _, well, seconds = _ANSWER.unpack_from(message)
    return well, message[_ANSWER.size :], seconds


# -- a message begins with the size of the rest, so that one system call is enough for most -----------------
def send(fd: int, message: bytes) -> None:
    sent = os.write(fd, message)
    while sent < len(message):
        sent += os.write(fd, message[sent:])


def _whole(fd: int, message: bytes) -> bytes:
    """The message that begins so; nothing may come after it before it is answered."""
    while len(message) < _SIZE.size or len(message) < _SIZE.size + _SIZE.unpack_from(message)[0]:
        more = os.read(fd, _CHUNK)
        if not more:
            raise EOFError
        message += more
    return message
