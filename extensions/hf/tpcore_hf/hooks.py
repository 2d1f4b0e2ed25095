"""What this extension adds to tpcore."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tpcore.backend.interface import hookimpl


@hookimpl
def tpcore_guards() -> Iterable[Any]:
    from torch.nn.parallel import DistributedDataParallel

    from tpcore.runtime.guards import Guard, refusing

    from .shard.refusals import refuse_replicas

    why = "it would make all parts of a model the first rank's"
    return [Guard(DistributedDataParallel, "__init__", refusing(refuse_replicas), why)]


@hookimpl
def tpcore_names() -> Mapping[str, str]:
    return dict.fromkeys(("lazy", "parallelize", "shard_sequence"), "tpcore_hf")


@hookimpl
def tpcore_commands(app: Any) -> None:
    from .command import export

    app.command()(export)
