"""The counterparts of other libraries' names, rows of ``names.tsv``, and calls that mean something else here, rows of
``meanings.tsv``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name


@dataclass(frozen=True)
class Counterpart:
    """The name here for a name of another library. ``new`` None: there is none, and ``note`` says what to do.
    ``same_call``: the call stays as it is, so rewriting the import is enough."""

    new: str | None
    note: str = ""
    same_call: bool = True


def _rows(file: str) -> Iterator[list[str]]:
    """The rows of a table, each with five fields."""
    for line in Path(__file__).with_name(file).read_text().splitlines():
        if not line.startswith("#"):
            yield [*line.split("\t"), "", "", "", ""][:5]


_STATE, _NEW_STATE = "megatron.core.parallel_state", "tpcore_nxd.parallel_state"
PACKAGES = {"neuronx_distributed": "tpcore_nxd", "torch_xla": "tpcore_nxd.xla"}
"""Packages whose modules and names are here by their own paths."""
_MPU = ("megatron.core.mpu", "megatron.mpu")
"""Other names of Megatron's parallel_state."""
_REMEDY = "delete it with its uses, or write it in torch"
FAMILIES = (*PACKAGES, "fairscale.nn.model_parallel", "megatron", "optimum.neuron", "torch_neuronx", "neuronxcc")

_MEANINGS = [*_rows("meanings.tsv")]
_ROWS = {old: Counterpart(new or None, note, not call) for old, new, call, note, _ in _rows("names.tsv")}
TABLES = {old: to for old, to in _ROWS.items() if to.new is not None}
TRANSFORMERS = {old: to for old, to in TABLES.items() if old.startswith("transformers.")}
"""What scripts of optimum-neuron import of transformers 4, and 5 has not."""
_ABSENT = {old: to for old, to in _ROWS.items() if to.new is None}
"""What tpcore lacks of NxD, with what to do instead: the longest match counts. Classes of optimum-neuron, which are in
several of its modules, have their name alone."""


def counterpart(name: str) -> Counterpart | None:
    """The counterpart of a full name, ``package.module.name``; None for a name of an unknown library."""
    for alias in _MPU:
        if _within(name, alias):
            name = f"{_STATE}{name.removeprefix(alias)}"
    if name in TABLES:
        return TABLES[name]
    owner = next((known for known in TABLES if name.startswith(f"{known}.")), None)
    if owner is not None:
        to = TABLES[owner]
        return Counterpart(to.new and f"{to.new}{name.removeprefix(owner)}", "", to.same_call)
    for old, here in ((_STATE, _NEW_STATE), *PACKAGES.items()):
        if _within(name, old) and _exists(new := f"{here}{name.removeprefix(old)}"):
            return Counterpart(new)
    if not any(_within(name, old) for old in (_STATE, *PACKAGES)):
        return _module(name) or _gone(name)
    fits = [old for old in _ABSENT if _within(name, old)]
    return _ABSENT[max(fits, key=len)] if fits else Counterpart(None, _REMEDY)


def _within(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def _module(name: str) -> Counterpart | None:
    """The counterpart of a module with names in the tables: the module here that has all of them as they are,
    or those from which the script has to import them itself."""
    names = {old.removeprefix(f"{name}."): to for old, to in TABLES.items() if old.startswith(f"{name}.")}
    if not names:
        return None
    names = {old: to for old, to in names.items() if "." not in old} or names
    homes = sorted({str(to.new).rpartition(".")[0] for to in names.values()})
    if homes[1:] or any(to.new != f"{homes[0]}.{old}" or not to.same_call for old, to in names.items()):
        return Counterpart(", ".join(homes), "names differ: import here what the lines below name", False)
    return Counterpart(homes[0])


def _gone(name: str) -> Counterpart | None:
    """'No counterpart' for a name of a listed library; None for what is of none."""
    note = next((to.note for kind, to in _ABSENT.items() if kind in name.split(".")), _REMEDY)
    return Counterpart(None, note) if old_library(name) else None


def old_library(name: str) -> bool:
    """Whether ``name`` is, or is in, a library whose names are known here, or is one that has gone."""
    return name in TRANSFORMERS or any(_within(name, family) for family in FAMILIES)


def _exists(name: str) -> bool:
    """Whether ``name`` is a module of tpcore, or an attribute of one."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError, ValueError):  # the last of what is no name, as a star
        return False
    return True


def notes_on(name: str, call: ast.Call) -> list[tuple[str, bool]]:
    """The notes on a call of ``name``, a full name of tpcore, that imports as before but means something else, and
    whether it has to be changed by hand."""
    args = {keyword.arg: keyword.value for keyword in call.keywords}
    notes = []
    for of, argument, values, note, must in _MEANINGS:
        if f".{name}".endswith(f".{of}") and (not argument or (argument in args and _is(args[argument], values))):
            notes.append((f"{argument}: {note}" if argument else note, bool(must)))
    return notes


def _is(node: ast.expr, values: str) -> bool:
    """Whether a value in a call is among those of a row. An expression may be any but 1 or False."""
    value = node.value if isinstance(node, ast.Constant) else node
    among = {"true": bool(value), "false": not value, "1": value == 1, "not 1": value not in (None, 1)}
    return not values or among[values]
