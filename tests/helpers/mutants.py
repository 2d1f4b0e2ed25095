"""Product code that is wrong in one place, for as long as a block runs: do the laws notice?"""

from __future__ import annotations
import __future__

import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from tpcore.layout import layout, shard


class Mutant(NamedTuple):
    """The source of ``function``, in which ``old`` stands once, with ``new`` in its place."""

    function: Callable[..., Any]
    old: str
    new: str

    def __str__(self) -> str:
        return f"{inspect.unwrap(self.function).__qualname__}: {self.old} -> {self.new}".replace("\n", " ")


def _without_caches() -> None:
    for module in (shard, layout):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@contextmanager
def alive(mutant: Mutant) -> Iterator[None]:
    """By the code of the function itself, so that whoever has imported it has the mutant."""
    function = inspect.unwrap(mutant.function)
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # without decorators
    assert source.count(mutant.old) == 1, f"{mutant.old!r} stands {source.count(mutant.old)} times in {source}"
    made: dict[str, Any] = {}
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(mutant.old, mutant.new), inspect.getfile(function), "exec", flags)
    exec(code, function.__globals__.copy(), made)
    before, function.__code__ = function.__code__, made[function.__name__].__code__  # type: ignore[attr-defined]
    _without_caches()
    try:
        yield
    finally:
        function.__code__ = before  # type: ignore[attr-defined]
        _without_caches()


def breaks(mutant: Mutant, laws: Iterable[Callable[[], None]]) -> bool:
    """Whether one of the ``laws`` does not hold while the mutant is alive."""
    with alive(mutant):
        try:
            for law in laws:
                law()
        except Exception:  # noqa: BLE001  whatever it breaks in
            return True
    return False
