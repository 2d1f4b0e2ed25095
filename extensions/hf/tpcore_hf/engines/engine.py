"""What an engine says of itself: the architectures, quantizations and adapters that it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Engine:
    """A version of an engine, as ``source`` has it.

    ``own``: architectures that it has itself. ``through``: by its backend of transformers' models, on purpose.
    ``gone``: the last version with each. ``lacks``: those that its transformers lacks yet. ``transformers``: the
    first version that it is installed with, and the first that it is not. ``defaults``: the option by which it does
    without the folder's generation config. ``adapter``: the options that load one. ``lora_refused``: entries of an
    adapter's config that it does not take when they are set."""

    name: str
    version: str
    source: str
    transformers: tuple[str, str]
    defaults: str
    adapter: str
    own: frozenset[str]
    through: frozenset[str]
    gone: dict[str, str]
    lacks: frozenset[str]
    quantization: frozenset[str]
    not_float16: frozenset[str]
    lora_ranks: tuple[int, ...]
    lora_refused: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def road(self, architecture: str) -> str:
        """How it runs an architecture of transformers: "own", "transformers", or "" if it does not."""
        import transformers

        if architecture in self.own:
            return "own"
        kind: Any = getattr(transformers, architecture, None)
        able = hasattr(kind, "is_backend_compatible") and kind.is_backend_compatible()
        able = able and architecture not in self.lacks | self.gone.keys()
        return "transformers" if architecture in self.through or able else ""


@cache
def engines() -> dict[str, Engine]:
    """By name. Engines of other versions take more, or less."""
    data: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("engines.json").read_text())
    kinds: dict[str, Any] = {
        "own": frozenset,
        "through": frozenset,
        "quantization": frozenset,
        "not_float16": frozenset,
    }
    kinds |= {"lora_ranks": tuple, "lora_refused": tuple, "transformers": tuple}
    return {
        name: Engine(name=name, **{k: kinds.get(k, lambda v: v)(v) for k, v in entries.items()})
        for name, entries in data.items()
    }
