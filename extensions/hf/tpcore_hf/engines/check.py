"""Whether an engine takes the files of a folder: what it would stumble over on a rented machine, found here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tpcore.checkpoint.forms.source import Reading
from tpcore.checkpoint.read.source import opened, tensors_of
from tpcore.errors import CheckpointError

from . import settings, weights
from .handover import COPY, ERROR, SAVE, WARNING, Engine, Handover, Remark, entries_of

_CHECKS: tuple[Callable[[Handover], Iterator[Remark]], ...] = (
    *(settings.architecture, weights.names, weights.ties, weights.quantization, weights.dtype),
    *(settings.heads, settings.tokenizer, settings.generation),
)


def findings(folder: Path, engine: Engine | None, tp: int = 1) -> list[Remark]:
    """What stands between ``folder`` and ``engine``, None for transformers itself. CheckpointError for a folder without
    a configuration."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        return [*settings.adapter(folder, engine)]
    config = entries_of(folder / "config.json")
    with ExitStack() as stack:
        try:
            source = stack.enter_context(opened(folder, Reading(quiet=True)))
            here = Handover(folder, engine, tp, config, tensors_of(source))
        except CheckpointError as e:
            return [Remark("files", ERROR, str(e), COPY)]
        found = [*_form(source.form, source.tp), *_beside(here)]
        checks = (settings.architecture,) if here.refused else _CHECKS
        return [*found, *(finding for check in checks for finding in check(here))]


def _form(form: str, tp: int) -> Iterator[Remark]:
    if not form.startswith("unsharded"):
        remedy = "tpcore checkpoint consolidate FOLDER OUT --config CONFIG writes what engines open"
        yield Remark("files", ERROR, f"a {form} checkpoint of tp={tp}, no files of transformers", remedy)


def _beside(here: Handover) -> Iterator[Remark]:
    if (here.folder / "adapter_config.json").is_file() and here.engine is not None:
        text = f"an adapter lies beside the model, and {here.engine.name} serves the model without it"
        yield Remark("adapters", ERROR, text, "model.merge_and_unload() before save_pretrained, or a folder of its own")
    if not list(here.folder.glob("*.safetensors")):
        yield Remark("files", WARNING, "weights are pickles, which run code when they are opened", SAVE)
