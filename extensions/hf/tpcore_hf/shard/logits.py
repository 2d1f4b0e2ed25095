"""Logits of which each rank has its part of the vocabulary, and the loss of a language model over them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcore import nested
from tpcore.comm import mappings as ops
from tpcore.comm.mappings import Map
from tpcore.comm.observer import plain
from tpcore.layers import ColumnParallelLinear
from tpcore.layers.loss import parallel_cross_entropy
from tpcore.private import plain_functions

from ..plan.inputs import is_own

_FACTS = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, torch.is_floating_point, Tensor.__len__}
    | {Tensor.ndimension, Tensor.nelement, Tensor.element_size, Tensor.get_device, Tensor.is_complex, torch.is_complex}
    | {getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "nbytes", "itemsize")}
    | {getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "is_meta", "is_cpu")}
)
_BY_ENTRY = frozenset(
    {Tensor.float, Tensor.to, Tensor.half, Tensor.bfloat16, Tensor.double, Tensor.detach, Tensor.tanh, torch.tanh}
    | {Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div, Tensor.__truediv__}
)
"""Of which the part of the result is the result of the part."""
_OF_GRADIENTS = frozenset({Tensor.retain_grad, inspect.unwrap(Tensor.register_hook)})  # a job wraps it


class _Whole(torch.autograd.Function):
    """What code below Python's functions gets: the shape, no values, and the way back for a gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, shape: tuple[int, ...], spread: Map) -> Tensor:
        ctx.spread = spread
        return torch.full((), torch.nan, dtype=part.dtype, device=part.device).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.spread(grad), None, None


class Logits(Tensor):
    """Gathered when they are first read, by all ranks: a loss that knows the parts need not."""

    part: Tensor
    to_whole: Map
    to_part: Map
    """From a gradient of the whole to that of the part."""
    read: Tensor | None

    @classmethod
    def of(cls, part: Tensor, shape: tuple[int, ...], gather: Map, spread: Map) -> Tensor:
        # tensors of a mode of torch's own, such as those without memory, take no other class
        if type(plain(part)) not in (Tensor, cls):
            return gather(part)
        logits: Logits = _Whole.apply(part, shape, spread).as_subclass(cls)
        logits.part, logits.to_whole, logits.to_part, logits.read = part, gather, spread, None
        return logits

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with plain_functions():
                return func(*args, **kwargs)
        if getattr(func, "__wrapped__", func) in _OF_GRADIENTS:
            raise ValueError(
                "in a training step the loss is computed of each rank's part of the logits, and the whole has no "
                "gradient: call model.eval(), in which logits and their loss are whole"
            )
        x = args[0] if args else None
        if func in _BY_ENTRY and isinstance(x, Logits) and x._stays and _is_number(args[1:]):
            return Logits.of(func(x.part, *args[1:], **kwargs), x.shape, x.to_whole, x.to_part)
        args, kwargs = nested.mapped(Logits.whole, (args, kwargs), Logits)
        return func(*args, **kwargs)

    @property
    def _stays(self) -> bool:
        # a function of autograd computes without a graph, and gives its result one, of which the part would not know
        return self.read is None and (torch.is_grad_enabled() or not self.part.requires_grad)

    def words(self) -> tuple[Tensor, int]:
        """This rank's part of the vocabulary, all of it where the parts are others, and the size of all."""
        of_words = self.read is None and self.part.shape[-1] != self.shape[-1]
        return self.part if of_words else self.whole(), self.shape[-1]

    def whole(self) -> Tensor:
        """All logits, on every rank. Collective when it is first called."""
        if self.read is None:
            with torch.enable_grad():  # who reads them first may need no gradient
                self.read = self.to_whole(self.part)
        return self.read


def _is_number(others: tuple[Any, ...]) -> bool:
    """Whether none of the other arguments has entries of its own, or a gradient, which would be this part's."""
    return not any(isinstance(t, Tensor) and (t.ndim or t.requires_grad) for t in others)


def keep_parts(head: Any, args: Any, output: Tensor) -> Tensor:
    """A hook of a head whose output is this rank's part: in training it stays that, until it is read."""
    gather = partial(_gathered, head)
    if not head.training or ops.transformed():
        return gather(output)
    return Logits.of(output, (*output.shape[:-1], head.out_features), gather, partial(_part_of, head))


def _gathered(head: Any, part: Tensor) -> Tensor:
    return head.features.gathered(part, head.tp)  # type: ignore[no-any-return]


def _part_of(head: Any, whole: Tensor) -> Tensor:
    return head.features.mask(head.features.scatter(whole, head.tp), head.tp)  # type: ignore[no-any-return]


READS_WHOLE_HEAD = "_tpcore_reads_whole_head"
"""The mark of a model of which a forward of TRL's gets the head's whole weight."""
IS_HEAD = "_tpcore_is_head"
"""The mark of a head of which the loss reads each rank's part."""


class VocabularyLoss:
    """``model.loss_function`` for a cut head: of the parts of logits that nobody has read, else ``whole``."""

    def __init__(self, head: ColumnParallelLinear, whole: Callable[..., Tensor], shift: bool) -> None:
        self._head, self._whole, self._shift = head, whole, shift

    def __call__(
        self,
        logits: Tensor,
        labels: Any = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        **options: Any,
    ) -> Tensor:
        vocab = self._head.out_features
        if not isinstance(logits, Logits) or logits.read is not None:
            vocab = vocab if vocab_size is None else vocab_size
            return self._whole(logits, labels, vocab, num_items_in_batch, **options)
        ignored, smoothing = options.get("ignore_index", -100), options.get("label_smoothing", 0.0)
        if options.get("shift_labels") is not None:
            labels = options["shift_labels"]
        elif labels is not None and self._shift:
            labels = F.pad(labels, (0, 1), value=ignored)[..., 1:]
        if labels is None:
            raise ValueError("the loss over a cut vocabulary needs labels, or shift_labels")
        losses = parallel_cross_entropy(logits.part, labels, smoothing, ignored, vocab_size=vocab, group=self._head.tp)
        total: Tensor = losses.sum() / ((labels != ignored).sum() if num_items_in_batch is None else num_items_in_batch)
        return total


def cut_loss(model: nn.Module, head: ColumnParallelLinear) -> None:
    """Let the logits of a training step stay parts until they are read, and the loss be computed from these. A forward
    that is not transformers' own may read them on some of the ranks: there they are gathered."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    head.__dict__[IS_HEAD] = True
    model.register_forward_pre_hook(_before, with_kwargs=True)
    if is_own(model):
        head.gather_output = False
        head.register_forward_hook(keep_parts)
        whole = getattr(model, "loss_function", None)
        if whole is ForCausalLMLoss or whole is ForMaskedLMLoss:
            shift = whole is ForCausalLMLoss
            model.loss_function = VocabularyLoss(head, whole, shift)  # type: ignore[assignment]


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("fused_lm_head") and not model.__dict__.get(READS_WHOLE_HEAD):
        raise ValueError(
            "TRL's loss multiplies by the weight of the head, of which each rank has a part: train this model with "
            "SFTTrainer or DPOTrainer of tpcore_hf.trl"
        )
