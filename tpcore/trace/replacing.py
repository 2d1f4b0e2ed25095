"""Other weights for a traced model: this rank's part of a checkpoint of any form and degree."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.huggingface import aligned
from ..checkpoint.source import opened
from ..checkpoint.stored import Stored
from ..checkpoint.unsharded import Reading
from ..errors import CheckpointError
from .artifact import Manifest, Weight

_SHOWN = 8


def shards_of(path: str, manifest: Manifest, rank: int) -> dict[str, Tensor]:
    """By the traced names. What was no part of the model's state_dict may be missing: it stays as it was.

    CheckpointError names what is missing, surplus, or of another shape or kind.
    """
    wanted = {name: weight for name, weight in manifest.weights.items() if weight.saved}
    with opened(path, Reading(quiet=rank != 0)) as source:
        names = {n for name, w in wanted.items() for n in (name, *w.others)}
        found = aligned(dict(source.tensors()), names)
        chosen = {name: _one(found, name, weight) for name, weight in wanted.items()}
        wrong = [f"{name!r} is missing" for name, stored in chosen.items() if stored is None]
        wrong += [f"{name!r} is no weight of the model" for name in found if name not in names]
        have = {name: stored for name, stored in chosen.items() if stored is not None}
        wrong += [text for name, stored in have.items() for text in _misfit(name, stored, wanted[name])]
        if wrong:
            more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise CheckpointError(
                f"{path} does not fit the traced model:\n  " + "\n  ".join(wrong[:_SHOWN]) + more
            )
        return {name: _shard(stored, wanted[name], rank, manifest.tp) for name, stored in have.items()}


def _one(found: dict[str, Stored], name: str, weight: Weight) -> Stored | None:
    """A tied weight may be stored under any of its names."""
    return next((found[n] for n in (name, *weight.others) if n in found), None)


def _misfit(name: str, stored: Stored, weight: Weight) -> list[str]:
    if stored.shape != weight.spec.shape:
        return [f"{name!r} has shape {stored.shape}, and the model {weight.spec.shape}"]
    if stored.dtype != weight.dtype and not (
        stored.dtype.is_floating_point and weight.dtype.is_floating_point
    ):
        return [f"{name!r} is of {stored.dtype}, and the model's of {weight.dtype}"]
    return []


def _shard(stored: Stored, weight: Weight, rank: int, n: int) -> Tensor:
    out = torch.empty(weight.spec.local_shape(n), dtype=weight.dtype)
    stored.job(out, weight.spec, rank, n).run()
    return out
