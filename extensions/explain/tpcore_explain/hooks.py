"""What this extension adds to tpcore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpcore.backend.interface import hookimpl
from tpcore.comm.observer import Observer


@hookimpl
def tpcore_names() -> Mapping[str, str]:
    return {"explain": "tpcore_explain.explain"}


@hookimpl
def tpcore_observer(certain: bool) -> Observer:
    from .checked import FirstCalls, raising

    return FirstCalls() if certain else raising()


@hookimpl
def tpcore_commands(app: Any) -> None:
    from .command import explain_step
    from .verify.command import verify

    app.command("explain")(explain_step)
    app.command()(verify)
