"""New weights for a traced model: this rank's part of a checkpoint of any form and degree."""

from __future__ import annotations

from torch import Tensor

from ...checkpoint.forms.source import Reading
from ...checkpoint.read.by_name import read_shards
from ..artifact import TraceManifest


def shards_of(path: str, manifest: TraceManifest, rank: int) -> dict[str, Tensor]:
    """This rank's shards of all tensors in the model's state_dict, by traced name.

    CheckpointError names tensors that are missing, surplus, or of another shape or kind.
    """
    saved = {name: weight for name, weight in manifest.weights.items() if weight.saved}
    wanted = {name: (weight.spec, weight.dtype) for name, weight in saved.items()}
    ties = {other: name for name, weight in saved.items() for other in weight.others}
    return read_shards(path, wanted, rank, manifest.tp, ties=ties, how=Reading(quiet=rank != 0))
