"""Tokens of a batch that a model deals to the ranks of cp in every forward, and the loss of them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpcore.comm import mappings as ops
from tpcore.comm.comm import Comm
from tpcore.layers.context_parallel import Way
from tpcore.layers.tokens import TokenOrder
from tpcore.runtime.context import current
from tpcore.runtime.digests import WHOLE_BATCH, are_read, compare_ranks

from .. import private
from ..plan.inputs import CACHES, is_refilled, is_watched, named, takes
from ..shard.logits import Logits
from .loss import DOCUMENTS, IGNORED, SequenceLoss, counted, total

ATTENTION = "tpcore_context_parallel"
"""The name by which transformers knows attention over the tokens of all ranks."""
_INPUTS, _LABELS = ("input_ids", "inputs_embeds", "token_type_ids", "lang_ids"), ("labels", "shift_labels")
_PLACES, _ADDED = "visual_pos_masks", "deepstack_visual_embeds"
_KNOWN = (*_INPUTS, *_LABELS, "position_ids", "attention_mask", "num_items_in_batch")


@dataclass(eq=False)
class DealtTokens:
    """What a model's attention, loss and hooks share."""

    comm: Comm
    way: Callable[[int], Way]
    """Of a number of tokens."""
    shifted: bool
    """Whether a token's label is the next token, as of a causal model, and not its own."""
    causal: bool
    """Whether all attention is."""
    packed: bool
    """Whether positions that begin again begin another document, as in most of transformers' causal models."""
    positions: Callable[[Tensor, Tensor | None], Tensor]
    """Of whole sequences, by their ids or embeddings and the mask of padding, where the caller gives none."""
    routed: bool = False
    """Whether a loss of the experts' routers weights tokens by ``attention_mask``."""
    masks: Callable[[Tensor | None, TokenOrder], Any] = lambda mask, order: mask
    """What the model below the head is given, of the mask that is dealt."""
    grids: bool = False
    """Whether positions may be ``[3, batch, tokens]``, of time, height and width, or 4 with the text's before them."""
    inside: Any = None
    """The model of text in one with towers, which is given embeddings of whole sequences and deals them."""
    compared: bool = False
    """Whether the ranks' batches were compared."""
    rows_are_whole: bool = False
    """While a module outside of the layers runs on them."""
    watched: dict[str, list[type[nn.Module]]] = field(default_factory=dict)
    """The modules that see a rank's tokens, and the classes of what is in them."""

    def order(self, length: int) -> TokenOrder:
        """Which of ``length`` tokens each rank has."""
        return TokenOrder(self.comm, self.way(length) == "ring" and self.causal)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the arguments of the model's forward."""
        kwargs = named(model, args, kwargs)
        self._check(model, kwargs)
        self.check_unseen(model)
        if not self._dealt(kwargs):
            read = {*_KNOWN} if self.inside is None else {n for n, v in kwargs.items() if isinstance(v, Tensor)}
            self._compare({name: torch.as_tensor(v) for name, v in kwargs.items() if name in read and v is not None})
            kwargs = self._deal(kwargs) if self.inside is None else self._with_labels(kwargs)
        if self.routed and kwargs["attention_mask"].dtype != torch.bool:
            kwargs[DOCUMENTS] = kwargs.pop("attention_mask")  # whose numbers are no weights
        if not self.shifted:
            kwargs.pop("num_items_in_batch", None)
        return kwargs

    def check_unseen(self, model: nn.Module) -> None:
        """ValueError for hooks and forwards that would see one rank's tokens."""
        if torch.compiler.is_compiling():
            return
        for name, module in model.named_modules():
            seen = name in self.watched and (is_refilled(module, self.watched[name]) or (name and is_watched(module)))
            if seen:
                raise ValueError(
                    f"{name or 'the model'} ({type(module).__name__}) has a hook, or a module or forward of another's, "
                    "that would see one rank's tokens with context parallelism: hooks of the model, and of what is "
                    "before and after its layers see whole sequences"
                )

    def _compare(self, batch: dict[str, Tensor]) -> None:
        """ValueError on all ranks if they have other sequences: looked for once, in a checked run each time."""
        once = self.compared and current().observer is None
        if not once and are_read(batch, self.comm):
            compare_ranks(batch, self.comm, "ranks {} and {} of cp", f"every rank of cp {WHOLE_BATCH}")
            self.compared = True

    def enter(self, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook of the model below the head, where routers are."""
        kwargs = named(base, args, kwargs)
        if self.inside is not None:
            kwargs = self._seen(base, kwargs)
        mask = kwargs.pop(DOCUMENTS, kwargs.get("attention_mask"))
        if not self._dealt({**kwargs, "attention_mask": mask}):
            raise ValueError(
                f"{type(base).__name__} has one rank's tokens with context parallelism, which the model around it "
                "deals: call that one, or pass what tpcore.shard_sequence makes of the batch"
            )
        if takes(base, "use_cache"):
            kwargs["use_cache"] = False
        order = self.order(_tokens_of(kwargs).shape[1] * self.comm.size)
        return (), {**kwargs, "attention_mask": self.masks(mask if mask.numel() else None, order)}

    def leave(self, base: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A hook: what routers say of all tokens, ``[batch * tokens, experts]``, whose loss is of means over them."""
        routers = output.get("router_logits")
        if routers is not None:
            rows, tokens = output["last_hidden_state"].shape[:2]
            order = self.order(tokens * self.comm.size)
            output["router_logits"] = tuple(order.whole(t.view(rows, tokens, -1)).flatten(0, 1) for t in routers)
        return output

    def deal(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's tokens of ``batch``. ValueError for what the model would refuse, and for one that is dealt."""
        if self.inside is not None:
            raise ValueError(
                f"the towers of {type(model).__name__} see whole sequences: call the model with them, as it deals what "
                "they become"
            )
        self._check(model, dict(batch))
        if self._dealt(batch):
            raise ValueError(
                "this batch has one rank's tokens already: call tpcore.shard_sequence on the whole batch once"
            )
        return self._deal(batch)

    def _deal(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Its ``attention_mask`` is ``[batch, 1, 1, tokens of all ranks]`` with the segments, or has no tokens where
        there is one."""
        kwargs, tokens = dict(batch), _tokens_of(batch)
        length, places = tokens.shape[1], kwargs.get("position_ids")
        others = {n: kwargs[n].shape for n in _KNOWN[:-1] if kwargs.get(n) is not None}
        others |= {"position_ids": places.shape[1:]} if self.grids and places is not None and places.ndim == 3 else {}
        wrong = next((n for n, shape in others.items() if len(shape) < 2 or shape[1] != length), None)
        if wrong is not None:
            raise ValueError(
                f"{wrong} of shape {tuple(others[wrong])} beside {length} tokens: pass [batch, {length}], of the whole "
                "sequences"
            )
        order = self.order(length)
        kwargs = self._with_labels(kwargs)
        segments = self._segments(kwargs.get("attention_mask"), places, tokens.shape)
        if places is None:
            places = self.positions(tokens, kwargs.get("attention_mask"))
        for name in _INPUTS:
            if kwargs.get(name) is not None:
                kwargs[name] = order.cut(kwargs[name])
        kwargs["position_ids"] = order.cut(places, places.ndim - 1)
        # 4-D masks are left as they are by every model, so this one arrives at its attention
        segments = tokens.new_empty(tokens.shape[0], 0, dtype=torch.int64) if segments is None else segments
        kwargs["attention_mask"] = segments[:, None, None]
        return kwargs

    def _with_labels(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """With this rank's labels."""
        found = {name: kwargs[name] for name in _LABELS if kwargs.get(name) is not None}
        if self.shifted and found.keys() == {"labels"}:
            # before the cut: the next token may be another rank's
            found["labels"] = F.pad(found["labels"], (0, 1), value=IGNORED)[:, 1:]
        return kwargs | {name: self.order(labels.shape[1]).cut(labels) for name, labels in found.items()}

    def _seen(self, text: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        """This rank's tokens of what a model of text is given after the towers, and of what they add in its layers."""
        mask, added = kwargs.pop(_PLACES, None), kwargs.pop(_ADDED, None)
        known = isinstance(kwargs.get("attention_mask"), Tensor | None)
        others = [n for n, v in kwargs.items() if isinstance(v, Tensor) and v.ndim and n not in _KNOWN]
        if others or not known:
            raise ValueError(
                f"context parallelism does not know how to cut {', '.join(others) or 'masks of several kinds'}, which "
                f"{type(text).__name__} is given: parallelize its text model alone"
            )
        kwargs = self._deal(kwargs)
        if mask is None or added is None:
            return kwargs
        order = self.order(mask.shape[1])
        here, numbers = order.cut(mask), order.cut(mask.flatten().cumsum(0).view_as(mask) - 1)
        return kwargs | {_PLACES: here, _ADDED: [rows[numbers[here]] for rows in added]}

    def _dealt(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether ``deal`` made these arguments: no other mask has this shape."""
        mask = kwargs.get("attention_mask")
        if mask is None or mask.ndim != 4 or mask.shape[1:3] != (1, 1):
            return False
        return mask.shape[3] in (0, _tokens_of(kwargs).shape[1] * self.comm.size)

    def _check(self, model: nn.Module, kwargs: dict[str, Any]) -> None:
        config = getattr(model if self.inside is None else self.inside, "config", None)
        for name in ("output_attentions", "output_hidden_states"):
            if kwargs.get(name, getattr(config, name, False)):
                raise ValueError(f"{name}=True with context parallelism: each rank has those of its tokens only")
        attention = getattr(config, private.ATTENTION, ATTENTION)
        if attention != ATTENTION:
            raise ValueError(
                f"attention {attention!r} was set after parallelize, and would see one rank's tokens: set it before"
            )
        if kwargs.get("return_dict") is False:
            raise ValueError("return_dict=False with context parallelism: leave it out, the loss is .loss")
        logits_to_keep = not isinstance(kwargs.get("logits_to_keep"), Tensor) and kwargs.get("logits_to_keep")
        cached = kwargs.get("use_cache") or any(kwargs.get(name) is not None for name in CACHES)
        if cached or logits_to_keep:
            raise ValueError(
                f"use_cache=True, {' or '.join(CACHES)} or logits_to_keep with context parallelism, which is for whole "
                "sequences: generate on a model that was parallelized without it"
            )
        if self.inside is None and (
            others := [n for n, v in kwargs.items() if isinstance(v, Tensor) and v.ndim and n not in _KNOWN]
        ):
            raise ValueError(f"context parallelism does not know how to cut {', '.join(others)}: leave it out")
        mask, labels, dealt = kwargs.get("attention_mask"), kwargs.get("labels"), self._dealt(kwargs)
        if dealt and self.shifted and kwargs.get("num_items_in_batch") is not None:
            raise ValueError(
                "num_items_in_batch with tokens of tpcore.shard_sequence: a loop counts the labels of one rank there; "
                "leave it out, the model counts those of all ranks"
            )
        if self.shifted and labels is not None and not isinstance(model.loss_function, SequenceLoss):
            raise ValueError(
                f"{type(model).__name__}.loss_function was replaced after parallelize, and would see the tokens of one "
                "rank: set it before"
            )
        if mask is not None and mask.ndim != 2 and not dealt:
            raise ValueError(
                f"an attention_mask of shape {tuple(mask.shape)} is not known by positions: pass [batch, tokens], or "
                "position_ids that begin again at each document"
            )
        if labels is not None and labels.ndim != 2:
            raise ValueError(f"labels of shape {tuple(labels.shape)} are not [batch, tokens]")

    def _segments(self, mask: Tensor | None, places: Tensor | None, shape: torch.Size) -> Tensor | None:
        """``[batch, tokens]``: a number for each document of a row, or False for padding; None: one document."""
        if mask is not None:
            return mask.ne(0)
        if places is None or not self.packed or len(places) == places.ndim == 3:  # a grid's say nothing of documents
            return None
        places = places[0] if places.ndim == 3 else places
        # where a position does not follow the one before: transformers' own sign of packed documents
        return F.pad(places.diff(dim=-1) != 1, (1, 0)).cumsum(-1).expand(shape[:2])

    def after(self, kwargs: dict[str, Any], output: Any, *, training: bool) -> Any:
        """Logits of all tokens, in a training step once they are read, and a masked model's loss."""
        labels = kwargs.get("labels")
        if not self.shifted and labels is not None:
            count = (labels != IGNORED).sum()
            part = torch.where(count > 0, output["loss"], 0.0) * count
            output["loss"] = total(part, self.comm) / counted(labels, self.comm)
        logits = output["logits"]
        order = self.order(logits.shape[1] * self.comm.size)
        if training and not ops.transformed():
            shape = logits.shape[0], logits.shape[1] * self.comm.size, *logits.shape[2:]
            # backward of `whole` sums the gradients of all ranks' copies, which are alike
            output["logits"] = Logits.of(logits, shape, order.whole, lambda grad: order.cut(grad) * self.comm.size)
        else:
            output["logits"] = order.whole(logits)
        return output


def _tokens_of(kwargs: Mapping[str, Any]) -> Tensor:
    names = ("input_ids", "inputs_embeds")
    tokens: Tensor | None = next((kwargs[n] for n in names if kwargs.get(n) is not None), None)
    if tokens is None or tokens.ndim < 2:
        shown = "None" if tokens is None else f"a tensor of shape {tuple(tokens.shape)}"
        raise ValueError(
            f"context parallelism deals input_ids [batch, tokens] or inputs_embeds [batch, tokens, size], not {shown}"
        )
    return tokens
