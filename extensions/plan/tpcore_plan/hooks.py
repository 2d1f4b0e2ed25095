"""What this extension adds to tpcore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpcore.backend.interface import hookimpl


@hookimpl
def tpcore_names() -> Mapping[str, str]:
    return {"plan": "tpcore_plan.search"}


@hookimpl
def tpcore_commands(app: Any) -> None:
    from .command import plan_mesh

    app.command("plan")(plan_mesh)
