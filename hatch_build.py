"""The README as an index shows it, where links by the paths of a checkout lead nowhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def readme(text: str, home: str | None) -> str:
    """Links lead below ``home``, the address of the repository; without one they are plain text."""
    if home is None:
        return LINK.sub(r"\2", text)
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({home}/{'raw' if m[1] else 'blob'}/HEAD/{m[3]})", text)


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        home = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, home)}
