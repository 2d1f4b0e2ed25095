"""The points of the matrix, generated: the product of each layer's axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
LEADS = {2: (4,), 3: (4, 4), 4: (4, 4, 2)}  # dims before the features: every sequence dim is cut by 1, 2, 4


@dataclass(frozen=True)
class Case:
    """One point of the matrix. ``options`` in the order of the axes that made it."""

    layer: str
    dtype: str
    options: tuple[tuple[str, Any], ...]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python 3.10 asks an instance for __setstate__ before it has its options
            raise AttributeError(name)
        for key, value in self.options:
            if key == name:
                return value
        raise AttributeError(f"{self} has no option {name!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.layer} {self.dtype} " + " ".join(f"{k}={v}" for k, v in self.options)


AXES: dict[str, dict[str, tuple[Any, ...]]] = {
    "column": {
        "seq": (None, 0, 1),
        "bias": (True, False),
        "gather_output": (True, False),
        "skip_bias_add": (False, True),
        "size": (24, 9),  # even; at tp=4 the last rank holds nothing but padding
        "stride": (1, 3),
    },
    "row": {
        "seq": (None, 0, 1),
        "bias": (True, False),
        "input_is_parallel": (True, False),
        "reduce_output": (True, False),
        "skip_bias_add": (False, True),
        "size": (24, 9),
        "stride": (1, 3),
    },
    "embedding": {
        "seq": (None, 0, 1),
        "cut": ("vocab", "dim", "dim uncollected"),
        "size": (12, 5),
        "padding_idx": (None, 0, -1),
        "mode": ("plain", "sparse", "scale_grad_by_freq", "max_norm"),
    },
    "layer_norm": {
        "seq": (None, 0, 1),
        "affine": ("weight and bias", "weight", "none"),
        "shape": ((8,), (3, 4)),
    },
    "rms_norm": {"seq": (None, 0, 1), "eps": (1e-6, None), "shape": ((8,), (3, 4))},
    "cross_entropy": {
        "size": (12, 5),
        "label_smoothing": (0.0, 0.1, 1.0),
        "ignore_index": (-100, 2),
        "ignored": ("none", "some", "all"),
        "magnitude": (1.0, 1000.0),
    },
}


def _meaningful(layer: str, o: dict[str, Any]) -> bool:
    """Whether the layer accepts this combination (that it refuses the others is tested by itself)."""
    if layer == "row":
        whole = o["seq"] is None or (o["input_is_parallel"] and o["reduce_output"])
        return whole and (o["reduce_output"] or not o["bias"] or o["skip_bias_add"])
    if layer == "embedding":
        return o["cut"] != "dim uncollected" or o["seq"] is None
    return True


def cases(layer: str, dtype: str, **only: Any) -> list[Case]:
    """Every combination of the layer's axes; number of dims and memory layout take turns over them."""
    axes = AXES[layer]
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    combinations = [o for o in combinations if _meaningful(layer, o)]
    shapes = itertools.cycle(itertools.product((3, 2, 4, 3, 4), (False, True)))
    out = []
    for o, (ndim, scrambled) in zip(combinations, shapes, strict=False):
        o |= {"ndim": max(ndim, 3) if o.get("seq") == 1 else ndim, "scrambled": scrambled}
        if all(o[k] == v for k, v in only.items()):
            out.append(Case(layer, dtype, tuple(o.items())))
    return out


def points() -> Iterator[tuple[str, int, str]]:
    """(layer, tp, dtype): one test each."""
    return itertools.product(AXES, (1, 2, 4), DTYPES)
