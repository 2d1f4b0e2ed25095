"""What a job must be to have the same bits at every degree."""

from __future__ import annotations

import torch

from ..layout.mesh import Mesh

_UNLIKE = {
    "ep": "an expert's product is over the tokens of all ep ranks at once, and over those of one at ep=1",
    "cp": "attention adds what each of the cp ranks has of the keys, in parts of the sizes that these have",
}


def check(most: int | None, mesh: Mesh, device: torch.device) -> None:
    """Raise ValueError, on all ranks, unless a job on ``mesh`` can be reproducible up to ``most`` ranks of tp."""
    if most is None:
        return
    if not isinstance(most, int) or most < 2 or most & (most - 1):
        raise ValueError(
            f"reproducible is the largest degree of tp at which the bits are the same, a power of two from 2 on, not "
            f"{most!r}"
        )
    axes = mesh.axes
    for axis, why in _UNLIKE.items():
        if axes.get(axis, 1) > 1:
            raise ValueError(f"reproducible={most} with {axis}={axes[axis]}: {why}: leave one of the two out")
    for axis, largest in (("tp", most), ("dp", 1 << 62)):
        size = axes.get(axis, 1)
        if size & (size - 1) or size > largest:
            up_to = f" up to {most}; pass a larger number, in each run" if size > largest else ""
            raise ValueError(
                f"reproducible={most} with {axis}={size}: what ranks add is a tree over a power of two of them{up_to}"
            )
    if device.type == "cpu" and (threads := torch.get_num_threads()) > 1:
        raise ValueError(
            f"reproducible={most} with {threads} threads: torch divides sums among them by the sizes of tensors, which "
            "differ between degrees: call torch.set_num_threads(1), or start with OMP_NUM_THREADS=1"
        )
