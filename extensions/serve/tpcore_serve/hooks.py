"""What this extension adds to tpcore."""

from __future__ import annotations

from typing import Any

from tpcore.backend.interface import hookimpl


@hookimpl
def tpcore_commands(app: Any) -> None:
    from .command import serve

    app.command()(serve)
