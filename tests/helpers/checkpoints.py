"""What tests of checkpoints share: a net and its values, the values in files, and changes that their sums follow."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpcore
from tpcore import Block, ShardSpec
from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.read.source import ShardRule, opened, tensors_of, unsharded


class Net(nn.Module):
    """Rows, columns, a fused projection, repeated heads, and a plain layer, which tp=3 pads."""

    def __init__(self, device: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        options: Any = {"device": device, "dtype": dtype, "pad": True}
        self.up = tpcore.ColumnParallelLinear(4, 8, gather_output=False, **options)
        self.down = tpcore.RowParallelLinear(8, 4, input_is_parallel=True, **options)
        self.gate_up = tpcore.ColumnParallelLinear(4, 8, bias=False, blocks=2, **options)
        heads: Any = {"bias": False, "blocks": [Block(2, 2, replicate=True)], "gather_output": False}
        self.kv = tpcore.ColumnParallelLinear(4, 2, **heads, **options)
        self.norm = nn.LayerNorm(4, device=device, dtype=dtype)


SPECS = {
    "up.weight": ShardSpec((8, 4), 0),
    "up.bias": ShardSpec((8,), 0),
    "down.weight": ShardSpec((4, 8), 1),
    "down.bias": ShardSpec((4,)),
    "gate_up.weight": ShardSpec.strided((8, 4), 0, 2),
    "kv.weight": ShardSpec((2, 4), 0, (Block(2, 2, True),)),
    "norm.weight": ShardSpec((4,)),
    "norm.bias": ShardSpec((4,)),
}
WANTED = {name: (spec, torch.float32) for name, spec in SPECS.items()}
"""What ``read_shards`` takes for a net."""
RULES = [ShardRule("up.*", 0), ShardRule("down.weight", 1), ShardRule("gate_up.weight", 0, 2)]


def full() -> dict[str, Tensor]:
    """Values of a net, unsharded."""
    g = torch.Generator().manual_seed(0)
    return {name: torch.randn(spec.shape, generator=g) for name, spec in SPECS.items()}


def assert_parts(found: dict[str, Tensor], rank: int, n: int, dtype: torch.dtype = torch.float32) -> None:
    """Exactly shard ``rank`` of ``n`` of each of the net's values."""
    assert list(found) == list(SPECS)
    for name, spec in SPECS.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], spec.shard(full()[name], rank, n).to(dtype)), (name, rank, n)


class Bomb:
    """Makes a directory when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, ("exploded",)


def values(path: Path, rules: Sequence[ShardRule] = (), tp: int | None = None, **how: Any) -> dict[str, Tensor]:
    """The unsharded tensors of the model in a checkpoint of any form, which is of ``tp`` ranks."""
    with opened(path, Reading(**how), rules) as source:
        assert tp in (None, source.tp)
        return {name: unsharded(stored) for name, stored in tensors_of(source, rules).items()}


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change a file of JSON. What changes puts as "1e400" is infinite in the file."""
    top = json.loads(path.read_text())
    change(top)
    path.write_text(json.dumps(top).replace('"1e400"', "1e400"))


def refit(folder: Path, name: str, change: Callable[[Any], object] | None = None) -> None:
    """Put the size and sum of a file on record, as they are now, after ``change`` of its JSON."""
    if change is not None:
        edit(folder / name, change)
    if name != "manifest.json":
        data = (folder / name).read_bytes()
        record = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        edit(folder / "manifest.json", lambda top: top["files"].update({name: record}))


def files_in(folder: Path) -> dict[str, bytes]:
    """Every file in it, but for locks."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: p.read_bytes() for name, p in files.items() if not name.endswith(".lock")}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value
