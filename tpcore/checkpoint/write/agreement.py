"""What ranks must agree on before a save: the tensors that they hold parts of, or write shares of. Plain values and
tensors that no layer cuts may differ: a load at another degree compares them itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...comm.comm import Comm
from ...errors import CheckpointError
from ...layout.layout import Layout
from ...runtime.consensus import gather
from ..storage.dtypes import dtype_name
from ..tensors.stored import Cut
from .snapshot import Entry, Part

_SHOWN = 8
Tables = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""By scope: descriptions of tensors, by file and name. Ranks that have a scope must agree on it."""


def described(entry: Entry) -> dict[str, Any]:
    """The record of a tensor in ``state.json``, except its checksum."""
    record = {"dtype": dtype_name(entry.dtype), "shape": list(entry.shape)}
    if isinstance(entry.cut, Layout):
        # without the slot, which the directories of the shards imply
        return record | {"spec": entry.cut.spec.to_json(), "axes": _axes(entry.cut)}
    return record | {"spec": entry.cut}


def outline(part: Part, stage: int, tp_rank: int) -> Tables:
    """The tensors that all ranks must agree on (cut over stages too), those of one stage (cut over tp), and those of
    one directory, of which each dp rank writes a share. An optimizer has no state of a parameter that had no gradient
    yet, so another rank may lack it."""
    scopes = everywhere, of_stage, of_directory = "", f"{stage}", f"{stage} {tp_rank}"
    tables: dict[str, dict[str, dict[str, Any]]] = {scope: {} for scope in scopes}
    for file, name, entry, written in part.placed():
        key, record, axes = f"{name!r} of {file}", described(entry), _axes(entry.cut)
        if axes:
            tables[everywhere if "pp" in axes else of_stage][key] = record | {"optional": file in part.optional}
        if written != file:
            tables[of_directory][key] = record | {"file": written}
    return tables


def digests_of(tables: Tables) -> dict[str, str]:
    texts = {scope: json.dumps(table, sort_keys=True) for scope, table in tables.items()}
    return {scope: hashlib.sha256(text.encode()).hexdigest()[:32] for scope, text in texts.items()}


def check_agreement(path: str, mine: Tables, digests: Sequence[Mapping[str, str]], world: Comm) -> None:
    """CheckpointError, on all ranks, if the ranks' parts of the save ``path`` do not fit together: where their
    ``digests`` differ, all ranks exchange the tables. A rank that writes nothing has no digests."""
    first: dict[str, int] = {}
    pairs = [
        (scope, first[scope], rank)
        for rank, here in enumerate(digests)
        for scope, digest in here.items()
        if digests[first.setdefault(scope, rank)][scope] != digest
    ]
    if not pairs:
        return
    tables = gather(mine, world)
    lines = [line for scope, a, b in pairs for line in _differences(a, tables[a][scope], b, tables[b][scope])]
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        title = f"cannot save {path}: the ranks' parts do not fit together. Build one model on all ranks"
        raise CheckpointError("\n  ".join([title, *lines[:_SHOWN], *more]))


def _differences(a: int, of_a: Mapping[str, Any], b: int, of_b: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(of_a.keys() | of_b.keys()):
        x, y = of_a.get(key), of_b.get(key)
        optional = (x or y or {}).get("optional") and (x is None or y is None)
        if x != y and not optional:
            yield f"{key}: rank {a} has {_text(x)}, rank {b} has {_text(y)}"


def _text(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "none"
    text, spec = f"{record['dtype']} of shape {record['shape']}", record["spec"]
    if record.get("axes"):
        text += f", cut of {spec['shape']} along dim {spec['dim']} over {' and '.join(record['axes'])}"
        if len(spec["blocks"]) > 1 or spec["blocks"][0][1:] != [1, False]:
            text += f" in blocks {spec['blocks']}"
    return text + (f" in {record['file']}" if "file" in record else "")


def _axes(cut: Cut) -> list[str]:
    return [axis for one in cut.cuts for axis in one.axes] if isinstance(cut, Layout) else []
