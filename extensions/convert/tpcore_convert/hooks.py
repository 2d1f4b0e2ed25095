"""What this extension adds to tpcore."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tpcore.backend.interface import hookimpl


@hookimpl
def tpcore_checkpoint_forms() -> Iterable[Any]:
    from . import megatron, neuron

    return neuron.FORM, megatron.FORM


@hookimpl
def tpcore_commands(app: Any) -> None:
    from .command import checkpoint

    app.add_typer(checkpoint, name="checkpoint")
