"""Who is let in: connections that come to say something, requests with the key, that no foreign page has made."""

from __future__ import annotations

import asyncio
import hmac
import resource
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD = 10.0  # seconds for the head of a request to come
_MOST = 4096
LOCAL = ("localhost", "127.0.0.1", "::1")


def connections() -> int:
    """How many may be open: half of the files, for those that are not counted yet and the ranks have some too."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)


class Connection(H11Protocol):
    """Ends if a head does not come in time, or if there are too many and it has no whole request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._since = self.loop.time()
        self._watch()
        if len(self.connections) > connections():
            silent = [c for c in self.connections if isinstance(c, Connection) and not c.is_asked(whole=True)]
            min(silent, key=lambda c: c._since).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def is_asked(self, whole: bool = False) -> bool:
        """Whether a request is here, and not answered yet. ``whole``: with its body."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not (whole and cycle.more_body)

    def _watch(self) -> None:
        if self._late is None and not self.is_asked():
            self._late = self.loop.call_later(_HEAD, self.transport.abort)
        elif self._late is not None and self.is_asked():
            self._late.cancel()
            self._late = None


class Door:
    """Refuses what a page in a browser makes others send: its name for this host, its origin, its kinds of content."""

    def __init__(self, app: Any, hosts: tuple[str, ...], refused: Callable[[int, str], Any], key: str = "") -> None:
        """``hosts``: names of this server; "*" admits all, "0.0.0.0" and "::" every address. ``key``: which requests
        have to say, but for /health, if it is not empty."""
        self._key = key.encode()
        self._app, self._hosts, self._refused = app, {host.lower() for host in hosts}, refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        wrong = self._wrong(scope["method"], scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if wrong is None else self._refused(*wrong))(scope, receive, send)

    def _wrong(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        for name, url in {"host": f"//{headers.get('host', '')}", "origin": headers.get("origin")}.items():
            if url is not None and not self._admits(url):
                value = headers.get(name, "")
                return 403, f"{name} {value!r} is none of this server's: tpcore serve --allow-host NAME admits it"
        scheme, _, said = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(said.encode("latin-1"), self._key)
        if self._key and path != "/health" and not known:
            return 401, "this server has an API key: a request says it as 'Authorization: Bearer KEY'"
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return 415, f"content-type {kind!r}: a request is application/json"
        return None

    def _admits(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname or ""
            return bool({host, "*"} & self._hosts) or (bool({"0.0.0.0", "::"} & self._hosts) and bool(ip_address(host)))
        except ValueError:  # it is no address, or no URL
            return False
