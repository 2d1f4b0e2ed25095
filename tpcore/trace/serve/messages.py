"""Messages between a traced model's owner and its processes, over two pipes per process.

After a forward has emptied the CPU caches, a line of Python takes ten times as long as in a loop. So messages
that repeat are passed on as bytes, and encoded or decoded only when they change. Pipes rather than sockets: a
read then takes 18 us from a pipe and 30 us from a socket.
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
    """The inverse of ``encoded``, with lists for tuples."""
    return json.loads(data)


def request(do: str, **arguments: Any) -> bytes:
    data = encoded([do, arguments])
    return _SIZE.pack(len(data)) + data


def read_request(fd: int) -> bytes:
    """The next request; ``value_of`` decodes name and arguments. EOFError if the owner closed the pipe."""
    return _read_message(fd, os.read(fd, _CHUNK))[_SIZE.size :]


def answer(well: bool, data: bytes, seconds: float = 0.0) -> bytes:
    """``data``: a result of ``encoded`` after success, of ``pack_outcome`` after an error."""
    return _ANSWER.pack(_ANSWER.size - _SIZE.size + len(data), well, seconds) + data


def read_answer(fd: int) -> tuple[bool, bytes, float]:
    """The arguments of ``answer``. EOFError if the process closed the pipe."""
    message = _read_message(fd, os.read(fd, _CHUNK))
    _, well, seconds = _ANSWER.unpack_from(message)
    return well, message[_ANSWER.size :], seconds


# -- a message begins with the size of its rest, so that most need one system call -------------------------
def send(fd: int, message: bytes) -> None:
    sent = os.write(fd, message)
    while sent < len(message):
        sent += os.write(fd, message[sent:])


def _read_message(fd: int, message: bytes) -> bytes:
    """The whole message that begins with these bytes. No other message may follow before its answer."""
    while len(message) < _SIZE.size or len(message) < _SIZE.size + _SIZE.unpack_from(message)[0]:
        more = os.read(fd, _CHUNK)
        if not more:
            raise EOFError
        message += more
    return message
