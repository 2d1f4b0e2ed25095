"""A program as StableHLO, and its collectives: their kind, groups, shapes and bytes."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

_OP = re.compile(r'"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)"\(([^)]*)\)')
_GROUPS = re.compile(r"(?:replica_groups|source_target_pairs) = dense<([^>]*)>")
_TYPES = re.compile(r": \(([^()]*)\) -> ")
_TENSOR = re.compile(r"tensor<(?:([0-9x]+)x)?([a-z]+)([0-9]+)>")
_ANY = re.compile(r'= "?(stablehlo\.\w+|func\.call|call)')
_BODY = re.compile(r"stablehlo\.(add|maximum|minimum|multiply|or|and) ")


@dataclass(frozen=True)
class HloCollective:
    """One collective: its replica groups, and each rank's inputs."""

    kind: str  # "all_reduce add", "all_gather", "reduce_scatter add", "all_to_all", "collective_permute"
    groups: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[str, tuple[int, ...]], ...]  # (dtype, shape) of each input
    nbytes: int


@dataclass(frozen=True)
class HloProgram:
    """The program of one call of ``sync`` (or of a read), the same on every rank."""

    text: str
    what: str = "sync"
    site: str = ""
    compiled: bool = True
    """Whether this call compiled it; False: it was compiled before and only ran again."""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def operations(self) -> int:
        return len(_ANY.findall(self.text))

    @cached_property
    def parameter_bytes(self) -> int:
        head = re.search(r"@main\((.*?)\)(?: ->|\s*\{)", self.text)
        return sum(_nbytes(*t) for t in _tensors(head.group(1))) if head else 0

    @cached_property
    def collectives(self) -> tuple[HloCollective, ...]:
        return tuple(self._collectives())

    def _collectives(self) -> Iterator[HloCollective]:
        for match in _OP.finditer(self.text):
            rest = self.text[match.end() :]
            kind, types, groups = match.group(1), _TYPES.search(rest), _GROUPS.search(rest)
            if types is None or groups is None:
                raise ValueError(f"cannot read the collective {self.text[match.start() : match.end() + 200]}")
            operands = _tensors(types.group(1))
            if kind == "all_reduce" and len(operands) > 1 and operands[-1][1] == ():
                operands = operands[:-1]  # torch_xla's token, which orders the collectives of a program
            if kind in ("all_reduce", "reduce_scatter"):
                body = _BODY.search(rest)
                kind = f"{kind} {body.group(1) if body else '?'}"
            rows = re.findall(r"\[([0-9, ]+)\]", groups[1]) or [groups[1]]  # a single number has no brackets
            members = tuple(tuple(int(n) for n in row.split(",")) for row in rows)
            yield HloCollective(kind, members, tuple(operands), sum(_nbytes(*operand) for operand in operands))


def _tensors(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (kind + bits, tuple(int(n) for n in dims.split("x")) if dims else ())
        for dims, kind, bits in _TENSOR.findall(text)
    ]


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = int(re.sub(r"\D", "", dtype.replace("bf", "")))
    return math.prod(shape) * max(1, bits // 8)


def pending(tensors: list[Tensor] | None = None) -> str:
    """StableHLO of this rank's pending graph: for ``tensors``, or for all live tensors."""
    import torch_xla

    xla: Any = torch_xla._XLAC
    text: bytes = xla._get_stablehlo(tensors or [], xla._xla_get_default_device(), [], False)
    # the module's name has a counter of instructions
    return re.sub(r"^module @\S+", "module @program", text.decode(), count=1)
