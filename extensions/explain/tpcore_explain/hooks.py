"""What this extension adds to tpcore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpcore.backend.interface import hookimpl


@hookimpl
def tpcore_names() -> Mapping[str, str]:
    return {"explain": "tpcore_explain.explain"}


@hookimpl
def tpcore_commands(app: Any) -> None:
    from .command import explain_step
    from .verify.command import verify

    app.command("explain")(explain_step)
    app.command()(verify)
