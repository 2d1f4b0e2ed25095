"""Which other libraries are here, and in which versions the extras were tested: their ranges in the metadata."""

from __future__ import annotations

import re
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from .log import log

LIBRARIES = ("hf", "trainer", "peft", "trl", "serve")
"""The extras of libraries whose internals are used, so that another release may be another thing."""


def module_spec(module: str) -> ModuleSpec | None:
    """Where a module would be imported from; None where it is not installed, nor for what a script has put into
    ``sys.modules`` in its place, which has no spec."""
    try:
        return find_spec(module)
    except ValueError:
        return None
    except ModuleNotFoundError as e:
        if not f"{module}.".startswith(f"{e.name}."):  # a package above it is there, and misses something
            raise
        return None


def _number(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])))


def _inside(installed: str, bounds: str) -> bool:
    """Of a range that is written with ``>=`` and ``<``."""
    found = _number(installed)
    low, high = (re.search(rf"{sign}([\d.]+)", bounds) for sign in (">=", "<"))
    return (low is None or found >= _number(low[1])) and (high is None or found < _number(high[1]))


@cache
def untested(extra: str) -> tuple[str, ...]:
    """A sentence for each installed library outside of the range of an extra; () where all are inside."""
    said = []
    for line in requires("tpcore") or ():
        found = re.match(rf"([\w.-]+)([^;]*);.*extra == .{extra}.$", line)
        if found is None:
            continue
        try:
            installed = version(found[1])
        except PackageNotFoundError:
            continue
        if not _inside(installed, found[2]):
            bounds = ", ".join(sorted(found[2].replace(" ", "").split(","), reverse=True))
            said.append(
                f"{found[1]} {installed} was not tested with tpcore[{extra}], which was with {found[1]} {bounds}: "
                f"pip install 'tpcore[{extra}]' installs a version that was"
            )
    return tuple(said)


@cache
def tell_untested(extra: str) -> None:
    """One warning, once."""
    for sentence in untested(extra) if extra in LIBRARIES else ():
        log.warning(sentence)
