"""Operations on a part of an activation in a checked run: what is not understood is an error, never right."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

from tpcore_explain.parts import Mark, PartOf, marked, understood

# of torch.nn.functional: everything else that a tensor subclass can be given is understood
UNKNOWN = (
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d affine_grid avg_pool1d avg_pool2d avg_pool3d batch_norm bilinear "
    "binary_cross_entropy binary_cross_entropy_with_logits channel_shuffle conv_tbc conv_transpose1d "
    "conv_transpose2d conv_transpose3d cosine_embedding_loss ctc_loss embedding embedding_bag fold "
    "fractional_max_pool2d fractional_max_pool3d gaussian_nll_loss grid_sample group_norm "
    "hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss linear_cross_entropy "
    "local_response_norm lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss max_pool1d max_pool2d "
    "max_pool3d max_unpool1d max_unpool2d max_unpool3d mse_loss multi_head_attention_forward "
    "multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss native_channel_shuffle one_hot "
    "pairwise_distance pdist pixel_shuffle pixel_unshuffle poisson_nll_loss smooth_l1_loss "
    "soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss unfold"
)
METHODS = (
    "add __add__ __radd__ mul_ div pow clamp masked_fill where exp tanh relu softmax logsumexp sum mean "
    "max amin var std norm cumsum topk sort argmax view reshape flatten transpose permute squeeze "
    "unsqueeze expand chunk split narrow select index_select gather __getitem__ __setitem__ cat "
    "contiguous clone detach to float half type_as size dim numel stride backward requires_grad_ "
    "register_hook matmul bmm repeat flip roll"
)


def test_of_functional_these_alone_are_not_understood() -> None:
    overridable = {f.__name__ for f in get_overridable_functions()[F]}
    names = {n for n in dir(F) if n in overridable and not n.startswith("_") and not n.endswith("_with_indices")}
    assert {name for name in names if not understood(name)} == {*UNKNOWN.split()} & names


def test_methods_that_models_use_are_understood() -> None:
    assert [name for name in METHODS.split() if not understood(name)] == []


def part(x: Tensor, dim: int, kind: str = "features") -> PartOf:
    def report(problem: str) -> None:
        raise ValueError(problem)

    return marked(x, Mark(kind, dim % x.ndim, x.shape[dim], 2, report))


IMAGE = torch.randn(2, 4, 6, 8)  # batch, channels, height, width
WRONG: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "unfold": (1, lambda x: F.unfold(x, 2)),
    "avg_pool2d": (2, lambda x: F.avg_pool2d(x, 2)),
    "batch_norm": (1, lambda x: F.batch_norm(x, None, None, training=True)),
    "group_norm": (1, lambda x: F.group_norm(x, 2)),
    "mse_loss": (3, lambda x: F.mse_loss(x, torch.zeros(IMAGE.shape))),
    "conv2d": (2, lambda x: F.conv2d(x, torch.ones(3, 4, 2, 2))),
    "conv1d": (2, lambda x: F.conv1d(x[..., 0], torch.ones(3, 4, 2))),
    "pad": (3, lambda x: F.pad(x, (1, 0))),
    "pad, height": (2, lambda x: F.pad(x, (0, 0, 0, 1), value=1.0)),
    "cumsum": (3, lambda x: x.cumsum(-1)),
    "amax": (1, lambda x: x.amax((0, 1))),
    "max": (3, lambda x: x.max()),
    "var": (3, lambda x: x.var(-1)),
    "topk": (3, lambda x: x.topk(2)),
    "sort": (3, lambda x: x.sort(descending=True)),
    "flip": (2, lambda x: x.flip(1, 2)),
    "roll": (2, lambda x: x.roll((1, 1), (0, 2))),
    "glu": (3, F.glu),
    "norm": (3, lambda x: x.norm(dim=-1)),
    "normalize": (1, F.normalize),
    "tril": (3, lambda x: x.tril()),
    "linalg_svdvals": (3, torch.linalg.svdvals),
}
RIGHT: dict[str, tuple[int, Callable[[Tensor], Tensor], int | None]] = {
    "convolved by channel": (1, lambda x: F.conv2d(x, torch.ones(4, 1, 3, 3), padding=1, groups=4), 1),
    "contracted channels": (1, lambda x: F.conv2d(x, torch.ones(3, 4, 2, 2)), None),
    "padded elsewhere": (1, lambda x: F.pad(x, (1, 1)), 1),
    "softmax elsewhere": (1, lambda x: x.softmax(-1), 1),
    "maximum elsewhere": (1, lambda x: x.max(-1).values, 1),
    "of two": (1, lambda x: torch.max(x, torch.zeros(())), 1),
    "in place": (1, lambda x: x.clone().mul_(2), 1),
    "an operator": (1, lambda x: 1 - x, 1),
    "taken out": (1, lambda x: x.as_subclass(Tensor), None),
}


@pytest.mark.parametrize("kind", ["features", "tokens"])
@pytest.mark.parametrize("name", WRONG)
def test_an_operation_that_would_be_wrong_is_named(name: str, kind: str) -> None:
    dim, operation = WRONG[name]
    x = part(IMAGE.clone(), dim, kind)
    expected = rf"^{re.escape(name.partition(',')[0])} sees only {x.mark.width} of {2 * x.mark.width} {kind}"
    with pytest.raises(ValueError, match=expected):
        operation(x)


@pytest.mark.parametrize("name", RIGHT)
def test_the_mark_follows_what_is_right(name: str) -> None:
    dim, operation, there = RIGHT[name]
    out = operation(part(IMAGE.clone(), dim))
    assert (out.mark.dim if isinstance(out, PartOf) else None) == there
