"""What this extension adds to tpcore."""

from __future__ import annotations

from collections.abc import Mapping

from tpcore.backend.interface import hookimpl


@hookimpl
def tpcore_names() -> Mapping[str, str]:
    return dict.fromkeys(("lazy", "parallelize", "shard_sequence"), "tpcore_hf")
