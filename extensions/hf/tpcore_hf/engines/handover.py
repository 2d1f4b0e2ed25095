"""A folder that is handed over to an engine, and what is found in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tpcore.checkpoint.stored import Stored
from tpcore.errors import CheckpointError

from ..load.gathered import not_saved
from ..load.names import in_files, model_of


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


LEVELS = ERROR, WARNING, NOTE = "error", "warning", "note"
SAVE = "write the folder with model.save_pretrained(DIR)"
COPY = f"copy all files of the folder, or {SAVE}"
_LONGEST = 300  # characters of another library's message


class Remark(NamedTuple):
    """``level``: an error keeps the engine from serving the model, or it would serve another one."""

    subject: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Handover:
    """A ``folder`` in transformers' files, for an ``engine``, or None for transformers, over ``tp`` ranks of it."""

    folder: Path
    engine: Engine | None
    tp: int
    config: Mapping[str, Any]
    tensors: Mapping[str, Stored]

    @cached_property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @cached_property
    def text(self) -> Mapping[str, Any]:
        """The language model's entries, which a model of several has inside."""
        return next(
            (v for k in ("text_config", "llm_config") if isinstance(v := self.config.get(k), dict)), self.config
        )

    @property
    def model(self) -> Any:
        """The model without values; None if transformers has none of this architecture, or refuses config.json."""
        return self._made[0]

    @property
    def refused(self) -> str:
        """What transformers, by which engines read it too, says of a configuration that it does not take."""
        return self._made[1]

    @cached_property
    def _made(self) -> tuple[Any, str]:
        kind: Any = getattr(transformers, self.architecture, None)
        if kind is None:
            return None, ""
        try:
            with quiet():
                config, model = transformers.AutoConfig.from_pretrained(self.folder), model_of(self.folder)
            kinds: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            if kinds.get(kind.config_class, None) is kind is not kinds.get(type(config), None):
                said = f"{config.model_type!r}, and a {self.architecture} is {kind.config_class.model_type!r}"
                return None, f"model_type is {said}"
        except Exception as e:  # noqa: BLE001  each family checks its own
            cause = e.__cause__ or e
            return None, " ".join(f"{type(cause).__name__}: {cause}".split())[:_LONGEST]
        return model, ""

    @cached_property
    def expected(self) -> Mapping[str, Any]:
        """What files of the model have; nothing where that is not known before they are written."""
        if self.model is None:
            return {}
        ignored = not_saved(self.model)
        tied = self.model.all_tied_weights_keys
        state = {k: t for k, t in self.model.state_dict().items() if k not in tied and k not in ignored}
        try:
            return in_files(self.model, {k: _Shape(tuple(t.shape), t.dtype) for k, t in state.items()})
        except CheckpointError:
            return {}


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self) -> Iterator[torch.Tensor]:
        yield torch.empty(self.shape, dtype=self.dtype, device="meta")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers logs nothing."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def entries_of(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as e:
        raise CheckpointError(f"there is no {path}, which save_pretrained writes: give its folder") from e
    except ValueError as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return entries
