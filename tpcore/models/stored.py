"""The names under which a model of transformers is stored, of a configuration alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.storage.files import read_file
from ..errors import CheckpointError, extra
from .loading import lazy
from .names import Source, Split, in_files


def model_of(config: str | os.PathLike[str]) -> Any:
    """The model of a ``config.json``, or of the directory that has one, without values.

    CheckpointError for a file that is none, or that names no class of transformers.
    """
    with extra("hf", "a config.json"):
        import transformers
    path = Path(config) / "config.json" if os.path.isdir(config) else Path(config)
    if not path.is_file():
        raise CheckpointError(f"there is no configuration {path}")
    try:
        entries = json.loads(read_file(str(path)))
        kind = getattr(transformers, entries["architectures"][0])
        made = kind.config_class.from_dict(entries)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as e:
        raise CheckpointError(
            f"{path} names no model class of transformers {transformers.__version__} in 'architectures': {e}"
        ) from e
    with lazy():
        return kind._from_config(made)


def stored_tensors(
    config: str | os.PathLike[str], tensors: Mapping[str, Source]
) -> Mapping[str, Source | Split[Source]]:
    """The tensors that files have of ``tensors``, by their names there, but for those tied to another. Those that a
    model has merged, as experts, are split when they are written.

    CheckpointError for names that the model of ``config`` does not have, and for tensors that are missing.
    """
    model = model_of(config)
    own = model.state_dict(keep_vars=True)
    targets = {name: source for name, source in model.all_tied_weights_keys.items() if source in tensors}
    unknown = sorted(tensors.keys() - own.keys())
    missing = sorted(own.keys() - tensors.keys() - targets.keys() - _sources(model, tensors))
    if unknown or missing:
        what = f"has no {', '.join(unknown[:5])}" if unknown else f"also has {', '.join(missing[:5])}"
        raise CheckpointError(f"{config}: a {type(model).__name__} {what}: this is a checkpoint of another model")
    return in_files(model, {name: t for name, t in tensors.items() if name not in targets})


def adapter_tensors(config: str | os.PathLike[str], tensors: Mapping[str, Source]) -> Mapping[str, Source]:
    """Those of ``tensors`` that peft's files have of an adapter, by their names there: see :func:`adapter_names`."""
    return {new: tensors[old] for old, new in adapter_names(config, tensors).items()}


def adapter_names(config: str | os.PathLike[str], names: Iterable[str]) -> dict[str, str]:
    """The name in peft's files of each tensor of an adapter, that of ``default`` or the only one, among ``names``.

    ``config``: an ``adapter_config.json``, or its folder. CheckpointError for names without adapters.
    """
    path = Path(config) / "adapter_config.json" if os.path.isdir(config) else Path(config)
    if not path.is_file():
        raise CheckpointError(f"there is no configuration {path}")
    if (bias := json.loads(read_file(str(path))).get("bias", "none")) != "none":
        raise CheckpointError(f"{path}: bias={bias!r} trains the model's own: write them with save_pretrained")
    found = [(name, match) for name in names if (match := _OF_ADAPTER.fullmatch(name))]
    adapters = sorted({match["adapter"] for _, match in found})
    wanted = "default" if "default" in adapters else adapters[0] if len(adapters) == 1 else None
    if wanted is None:
        raise CheckpointError(f"{path}: the checkpoint has the adapters {adapters}, and one is written, 'default'")
    kept = [(name, m) for name, m in found if m["adapter"] == wanted]
    return {name: m["owner"] + (m["kind"] or "") + m["leaf"] for name, m in kept}


_OF_ADAPTER = re.compile(
    r"(?P<owner>.+?)(?:(?P<kind>\.lora_\w+)|\.modules_to_save)\.(?P<adapter>[^.]+)(?P<leaf>(?:\..+)?)"
)
"""A name in memory. In files the adapter's name is left out, and ``modules_to_save``."""


def _sources(model: Any, given: Iterable[str]) -> set[str]:
    """The tensors to which tensors among ``given`` are tied."""
    return {source for name, source in model.all_tied_weights_keys.items() if name in given}
