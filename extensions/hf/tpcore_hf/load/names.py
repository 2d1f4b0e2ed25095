"""The names of a model's tensors in files, by transformers' own mapping, which renames modules of many families."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from tpcore.checkpoint.storage.files import read_file
from tpcore.checkpoint.storage.tensorfile import Writable
from tpcore.errors import CheckpointError, extra

from .lazy import lazy

Content = TypeVar("Content", bound=Writable)

MERGED = (
    "{} is stored with {} merged with others, which is not done one by one: model.save_pretrained(dir, "
    "state_dict=tpcore_hf.full_state_dict(model)) holds all of it in memory"
)


@dataclass(frozen=True)
class Split(Generic[Content]):
    """One of the tensors that files have of a ``source``, the tensor ``of`` the model: all are made when the first of
    them is written."""

    source: Content
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    values: dict[str, Tensor]
    model: Any
    of: str

    def pieces(self) -> Iterator[Tensor]:
        if self.name not in self.values:
            pieces = list(self.source.pieces())
            tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            self.values.update(stored_as(self.model, {self.of: tensor}))
        yield self.values.pop(self.name).contiguous()


def in_files(model: Any, tensors: Mapping[str, Content]) -> dict[str, Content | Split[Content]]:
    """What files have of ``tensors``, which are named as in the model: by names in files."""
    sizes = {i + 1: name for i, name in enumerate(tensors)}  # a number of entries identifies a tensor once renamed
    with suppress(CheckpointError):
        renamed = stored_as(model, {name: torch.empty(size, device="meta") for size, name in sizes.items()})
        names = {sizes.get(len(t)): new for new, t in renamed.items() if t.ndim == 1}
        if names.keys() == tensors.keys() and len(renamed) == len(tensors):
            return {names[name]: t for name, t in tensors.items()}
    values: dict[str, Tensor] = {}
    stored: dict[str, Content | Split[Content]] = {}
    for name, source in tensors.items():
        parts = stored_as(model, {name: torch.empty(source.shape, dtype=source.dtype, device="meta")})
        for part, t in parts.items():
            if part in stored:  # each alone would be taken for all of it
                raise CheckpointError(MERGED.format(type(model).__name__, name))
            stored[part] = Split(source, tuple(t.shape), t.dtype, part, values, model, name)
    return stored


def stored_as(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What files have of tensors of the model, by names in files: experts, for example, each by itself. CheckpointError
    if files have one of them merged with others."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        stored: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    except Exception as e:
        raise CheckpointError(f"{MERGED.format(type(model).__name__, next(iter(tensors)))}: {e}") from e
    return stored


def _path_of(config: str | os.PathLike[str], name: str) -> Path:
    """``config``, or the file of this ``name`` where it is a directory; CheckpointError if there is none."""
    path = Path(config) / name if os.path.isdir(config) else Path(config)
    if not path.is_file():
        raise CheckpointError(f"there is no configuration {path}")
    return path


def model_of(config: str | os.PathLike[str]) -> Any:
    """The model of a ``config.json``, or of the directory that has one, without values. CheckpointError for a file that
    is none, or that names no class of transformers."""
    with extra("hf", "a config.json"):
        import transformers
    path = _path_of(config, "config.json")
    try:
        entries = json.loads(read_file(str(path)))
        kind = getattr(transformers, entries["architectures"][0])
        model_config = kind.config_class.from_dict(entries)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise CheckpointError(
            f"{path} names no model class of transformers {transformers.__version__} in 'architectures': {e}"
        ) from e
    with lazy():
        return kind._from_config(model_config)


def stored_tensors(
    config: str | os.PathLike[str], tensors: Mapping[str, Content]
) -> Mapping[str, Content | Split[Content]]:
    """The tensors that files have of ``tensors``, by their names there, but for those tied to another. Those that a
    model has merged, as experts, are split when they are written. CheckpointError for names that the model of
    ``config`` does not have, and for tensors that are missing."""
    model = model_of(config)
    state = model.state_dict(keep_vars=True)
    tied = model.all_tied_weights_keys.items()
    targets = {name for name, source in tied if source in tensors}
    unknown = sorted(tensors.keys() - state.keys())
    missing = sorted(state.keys() - tensors.keys() - targets - {source for name, source in tied if name in tensors})
    if unknown or missing:
        difference = f"has no {', '.join(unknown[:5])}" if unknown else f"also has {', '.join(missing[:5])}"
        raise CheckpointError(f"{config}: a {type(model).__name__} {difference}: this is a checkpoint of another model")
    return in_files(model, {name: t for name, t in tensors.items() if name not in targets})


def adapter_tensors(config: str | os.PathLike[str], tensors: Mapping[str, Content]) -> Mapping[str, Content]:
    """Those of ``tensors`` that peft's files have of an adapter, ``default`` or the only one, by their names there.
    ``config``: an ``adapter_config.json``, or its folder. CheckpointError for names without adapters."""
    path = _path_of(config, "adapter_config.json")
    if (bias := json.loads(read_file(str(path))).get("bias", "none")) != "none":
        raise CheckpointError(f"{path}: bias={bias!r} trains the model's own: write them with save_pretrained")
    matches = [(name, match) for name in tensors if (match := _OF_ADAPTER.fullmatch(name))]
    adapters = sorted({match["adapter"] for _, match in matches})
    adapter = "default" if "default" in adapters else adapters[0] if len(adapters) == 1 else None
    if adapter is None:
        raise CheckpointError(f"{path}: the checkpoint has the adapters {adapters}, and one is written, 'default'")
    selected = [(name, m) for name, m in matches if m["adapter"] == adapter]
    return {m["owner"] + (m["kind"] or "") + m["leaf"]: tensors[name] for name, m in selected}


_OF_ADAPTER = re.compile(
    r"(?P<owner>.+?)(?:(?P<kind>\.lora_\w+)|\.modules_to_save)\.(?P<adapter>[^.]+)(?P<leaf>(?:\..+)?)"
)
"""A name in memory. In files the adapter's name is left out, and ``modules_to_save``."""
