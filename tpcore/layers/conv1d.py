"""Linear layers with a weight of shape ``[input, output]``, as GPT-2's ``Conv1D`` in transformers has it."""

from __future__ import annotations

from torch import Tensor, nn

from .linear import ColumnParallelLinear, RowParallelLinear, WeightForm


def _sizes(plain: nn.Module, layer: type[nn.Module]) -> tuple[int, int]:
    # recognised by its attributes, for transformers is not a dependency
    outputs, weight = getattr(plain, "nf", None), getattr(plain, "weight", None)
    if not isinstance(outputs, int) or not isinstance(weight, Tensor) or weight.ndim != 2:
        raise ValueError(
            f"{layer.__name__}.from_plain takes transformers' Conv1D, which has a weight of two dims and nf, "
            f"not {type(plain).__name__}"
        )
    if weight.shape[1] != outputs:
        raise ValueError(
            f"{layer.__name__}.from_plain: a weight of {tuple(weight.shape)} is not [inputs, nf={outputs}]"
        )
    return weight.shape[0], outputs


def _initial_weight(t: Tensor) -> Tensor:
    return nn.init.normal_(t, std=0.02)


CONV1D = WeightForm(_sizes, _initial_weight, lambda fan_in: nn.init.zeros_, transposed=True)


class ColumnParallelConv1D(ColumnParallelLinear):
    """``y_r = x @ w_r + b_r``: ``ColumnParallelLinear`` with a weight of ``[in_features, out_features]``.

    Weight and bias are initialised as in transformers' ``Conv1D``: normal with deviation 0.02, and zero. Use
    ``blocks=3`` for GPT-2's fused q|k|v, ``c_attn``.
    """

    form = CONV1D


class RowParallelConv1D(RowParallelLinear):
    """``y = sum over ranks of x_r @ w_r, + b``: ``RowParallelLinear`` with a weight of
    ``[in_features, out_features]``. Initialised as in transformers' ``Conv1D``."""

    form = CONV1D
