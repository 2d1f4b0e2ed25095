"""What AWS's native PyTorch refuses or narrows, as data: each limit with the SDK and the source that shows it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SDK = "2.33"
"""The newest SDK that the table has been compared with."""
_GROUP = "torch_neuronx/distributed/backend.py, class ProcessGroupNeuron, of the source before SDK 2.33"
_OPERATION = "the operation's can_handle in torch_neuronx/python_ops/xla_ops, of the source before SDK 2.33"
_COMPILER = "AWS's reference of torch.compile's backend, 14 Oct 2026"
_TYPES = "AWS's page on data types of SDK 2.33, and its compiler's errors NCC_EVRF061 and 063"
_USERS = "users' reports of Trn2, betas 2 and 3 of 2026"


@dataclass(frozen=True)
class Limit:
    """One limit. ``error``: the class that AWS's library raises; None where it changes values without a word."""

    name: str
    what: str
    error: type[Exception] | None
    source: str
    since: str = "2.30"  # the first SDK whose native PyTorch was public

    def to_json(self) -> dict[str, str | None]:
        error = None if self.error is None else self.error.__name__
        return {**vars(self), "error": error}


TABLE = (
    Limit("unequal_parts", "all-to-all of parts of unequal sizes", NotImplementedError, f"{_GROUP}: alltoall_base"),
    Limit("group_sizes", "all-to-all over other sizes than 4, 8, 16 or 32n", RuntimeError, f"{_OPERATION}: all_to_all"),
    Limit(
        *("first_rank", "all-to-all over a group whose first rank is no multiple of its size", RuntimeError),
        f"{_OPERATION}: all_to_all",
    ),
    Limit("spread_groups", "all-to-all over ranks that are not consecutive", RuntimeError, f"{_GROUP}: alltoall"),
    Limit("send_recv", "send, recv and what is made of them", NotImplementedError, f"{_GROUP}, which has none"),
    Limit("empty", "tensors without elements", ValueError, f"{_OPERATION}: all_reduce, all_gather"),
    Limit("barrier", "a barrier of some ranks only", NotImplementedError, f"{_GROUP}: barrier"),
    Limit("other_device", "tensors of another device in a collective", RuntimeError, f"{_OPERATION}: all"),
    Limit("early_device", "a device in use before the process group is made", AssertionError, f"{_GROUP}: __init__"),
    Limit("other_index", "a device of another index than the process's own", RuntimeError, _USERS),
    Limit("dynamic", "dynamic sizes in a compiled graph", RuntimeError, f"{_COMPILER}, dynamic"),
    Limit("graph_operators", "operators in a compiled graph that are not torch's own", RuntimeError, _COMPILER),
    Limit("signed_zeros", "broadcast is a sum with zeros: -0.0 arrives as 0.0", None, f"{_GROUP}: broadcast"),
    Limit("whole_sums", "whole numbers are summed over ranks in float32, right up to 2**24", None, _TYPES),
    Limit("float64", "64-bit floating point is computed in 32 bits", None, "AWS's page on 64-bit dtypes, 8 Oct 2026"),
    Limit("int64", "64-bit whole numbers keep their lower 32 bits", None, "AWS's page on 64-bit dtypes, 8 Oct 2026"),
)
_COMM = "or take tpcore's Comm, which gathers instead"
REMEDIES = {
    "unequal_parts": f"pad the parts, and name no sizes, {_COMM}",
    **dict.fromkeys(("group_sizes", "first_rank", "spread_groups"), f"gather and take your part, {_COMM}"),
    "send_recv": "take tpcore's Comm.permute or PipelineModel",
    "empty": "leave the call out on all ranks",
    "barrier": "let all ranks meet, or sum a number over the group",
    "other_device": "move them by .to(tpcore.current().device), and compile with backend='neuron'",
    "early_device": "call tpcore.init before",
    "other_index": "leave the index out, or take tpcore.current().device",
    "dynamic": "compile with dynamic=False, and pad to one shape",
    "graph_operators": "leave them out of what is compiled",
}
"""What a program does instead."""
NARROW = {
    "float64": {torch.float64: torch.float32, torch.complex128: torch.complex64},
    "int64": {torch.int64: torch.int32},
}
_SUMS = {torch.int64: torch.float32, torch.int32: torch.float32}
_EXCHANGED = 4, 8, 16


class Refusals:
    """The limits that hold in this process, by name, and what they have refused."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_name = {limit.name: limit for limit in TABLE}
        self.names = frozenset(names)
        self.narrow = {wide: dtype for name in NARROW if name in self.names for wide, dtype in NARROW[name].items()}
        self.sums = _SUMS if "whole_sums" in self.names else {}
        self.refused: Counter[str] = Counter()

    def refuse(self, name: str, wrong: bool, detail: Any = "") -> None:
        """Raise the error of limit ``name`` if it holds here, and if something is ``wrong``."""
        if wrong and name in self.names:
            self.refused[name] += 1
            limit = self._by_name[name]
            parts = f"Neuron (stand-in, limit {name}) refuses {limit.what}", detail, REMEDIES[name]
            raise (limit.error or ValueError)(": ".join(str(part) for part in parts if part))

    def exchange(self, ranks: Sequence[int], parts: Sequence[int]) -> None:
        """Refuse an all-to-all that Neuron does not take. ``parts``: sizes, none if all are equal."""
        size = len(ranks)
        self.refuse("unequal_parts", any(part != 1 for part in parts), f"sizes {list(parts)}")
        self.refuse("group_sizes", size not in _EXCHANGED and size % 32 != 0, f"{size} ranks {list(ranks)}")
        self.refuse("first_rank", ranks[0] % size != 0, f"ranks {list(ranks)}")
        self.refuse("spread_groups", list(ranks) != list(range(ranks[0], ranks[0] + size)), f"ranks {list(ranks)}")


def of(text: str) -> frozenset[str]:
    """The limits of an SDK ("2.33"), of a list of names ("empty,int64"), or "none"."""
    if re.fullmatch(r"\d+(\.\d+)*", text):
        return frozenset(limit.name for limit in TABLE if _numbers(limit.since) <= _numbers(text))
    names = frozenset(() if text == "none" else text.split(","))
    if names <= {limit.name for limit in TABLE}:
        return names
    raise ValueError(f"an SDK such as {SDK}, names of limits or none")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
