"""An optimizer whose state is sharded over data parallel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ...runtime.context import current
from ...runtime.elementwise import check_elementwise, own_parts
from ..clip import norm_in_order, norm_of, scale_to
from ..data_parallel import Bucket, overlap_of, present_anywhere
from ..parameters import check_for_parts, check_not_replaced, data_comm, named_of, names_of
from .chunk import Accumulation, ParameterChunk, ReadRun, Reduction, in_buckets, kind_of
from .state import IN_STEP, MASTER, Outline, check_kind, entries_of, outline_of, renumbered


class Zero1(torch.optim.Optimizer):
    """``optimizer_class`` with its state sharded over dp (dp times cp): 1/dp of it on each rank, and the same steps.

    Each parameter's local shard is flattened and cut into dp equal chunks, the last one padded. A step gives each rank
    its chunks of the mean gradients, steps them, and gathers the new weights: for each bucket one reduce-scatter and
    one all-gather. Gradients are freed as they are reduced. This is stage 1 of ZeRO (Rajbhandari et al., 2020,
    https://arxiv.org/abs/1910.02054).

    ``optimizer_class``: any optimizer that treats each entry of a parameter independently: AdamW, Adam, SGD, Adagrad,
    RMSprop, NAdam and others. ``params``: as for that class, preferably ``model.named_parameters()``. ``options``: the
    class's own (``lr=...``). Groups, schedulers and ``add_param_group`` work as usual.

    ``master_dtype``: each rank keeps a master copy of its chunks in this dtype, e.g. ``torch.float32`` for bfloat16
    weights, which are then the rounded master values. ``grad_dtype``: the dtype in which gradients of several backwards
    are summed and sent. ``bucket_mb``: MiB of gradients or weights in one collective.

    The base optimizer is made at the first step, so that the model may be sharded, moved or loaded before. Step with
    ``tpcore.optimizer_step``, which can clip and skip; ``step()`` does neither. The constructor and all methods that
    move tensors are collective over dp. ValueError for an optimizer that mixes entries, for a parameter given twice,
    built under another context, cut by torch's own parallelism or over dp.
    """

    tpcore_steps_parts: frozenset[str] = frozenset()  # its base optimizer was asked
    grad_norm: Tensor | None = None
    """The norm of the last step's gradients before clipping, if ``optimizer_step`` computed it."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: Any,
        *,
        master_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        bucket_mb: float = 4,
        **options: Any,
    ) -> None:
        if not bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0, not {bucket_mb}")
        for name, dtype in {"master_dtype": master_dtype, "grad_dtype": grad_dtype}.items():
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating dtype, not {dtype}")
        self._class, self._options = optimizer_class, options
        self._entries = check_elementwise(optimizer_class, options)
        self._dp = current().data
        self._master_dtype, self._bucket = master_dtype, int(bucket_mb * 2**20)
        self._gradients = Accumulation(grad_dtype)
        self._reduction = Reduction(self._gradients, self._dp, self._bucket)
        self._base: torch.optim.Optimizer | None = None
        self._chunks: dict[Tensor, ParameterChunk] = {}
        self._new: list[ParameterChunk] = []  # which the base optimizer may not have seen
        self._stepped: list[ParameterChunk] | None = None  # with a gradient, between the mean and the step
        # on the CPU, whatever the default device: only its defaults are used, and the groups of one that makes its own
        own = own_parts(optimizer_class)
        prototype = optimizer_class(params if own else [nn.Parameter(torch.zeros(1, device="cpu"))], **options)
        super().__init__(prototype.param_groups if own else params, prototype.defaults)
        steppers = current().steppers
        steppers[:] = [other for other in steppers if other() is not None] + [ref(self)]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params, names = named_of(param_group)
        check_for_parts(params, names)
        super().add_param_group(param_group)
        self._gradients.watch(params)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a Zero1 is neither copied nor pickled: its chunks are of these parameters and its collectives of this "
            "job. Make another of the copy's parameters and load optimizer.state_dict() into it, or save it by "
            "tpcore.checkpoint.save"
        )

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def base(self) -> torch.optim.Optimizer:
        """The optimizer that steps the chunks; its groups have the options of this optimizer's groups."""
        if self._base is not None and self._changed():
            self._base = None
            overlap_of(self).drop()  # of other chunks
        if self._base is None:
            check_for_parts(self._parameters, names_of(self.param_groups))
            self._chunks = {}
            self._base = self._class([self._add(group) for group in self.param_groups], **self._options)
        for group in self.param_groups[len(self._base.param_groups) :]:
            self._base.add_param_group(self._add(group))
        for chunk in self._new:
            chunk.free()
        self._new = []
        _copy_options(self.param_groups, self._base.param_groups)
        return self._base

    def _add(self, group: dict[str, Any]) -> dict[str, Any]:
        """The group of the base optimizer for ``group``, over new chunks."""
        chunks = [ParameterChunk(p, data_comm(p), self._master_dtype) for p in group["params"]]
        self._new += chunks
        self._chunks |= {chunk.parameter: chunk for chunk in chunks}
        return {**group, "params": [chunk.value for chunk in chunks]}

    def _changed(self) -> bool:
        """Whether parameters were sharded, moved or converted since the base was made. ValueError if there is
        state already."""
        new = [p for p, chunk in self._chunks.items() if chunk.kind != kind_of(p)]
        if new and self.state:
            raise ValueError(
                f"a parameter of {self._chunks[new[0]].kind} is one of {kind_of(new[0])} now, and the optimizer has "
                "its state: cut, move and convert the model before the first step, or make the optimizer anew"
            )
        return bool(new)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also a mean that no step has used. Gradients are always set to None."""
        for p in self._parameters:
            self._gradients.drop(p)
        self.skip()
        self._gradients.watch(self._parameters)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Give each rank its chunks of the mean over dp, and free the gradients. Does nothing if done. Raises
        ValueError for gradients of a backward since, which the step would leave out."""
        if self._stepped is not None:
            if any(self._gradients.of(p) is not None for p in self._parameters if p.requires_grad):
                raise ValueError(
                    "a backward has run since the mean of this step's gradients was taken, by reduce_gradients or by "
                    "clip_grad_norm of a Zero1's parameters: the step would leave it out. Clip once, after the last "
                    "backward, and drop a Zero1 that another optimizer has replaced"
                )
            return
        self.base()
        stepped = self._reduction.run(self._reduced_chunks(), overlap_of(self).take())
        if not stepped and not self.state:  # before its first step
            check_not_replaced(self.param_groups)
        self._stepped = stepped
        for p in self._parameters:
            self._gradients.drop(p)  # also of parameters without entries

    def buckets(self) -> list[Bucket]:
        """The buckets of gradients that ``overlap_grad_reduce`` starts."""
        self.base()
        return self._reduction.buckets(self._reduced_chunks())

    def _reduced_chunks(self) -> list[ParameterChunk]:
        return [chunk for p, chunk in self._chunks.items() if p.requires_grad and chunk.numel]

    @property
    def reduced(self) -> bool:
        """Whether the mean of this step's gradients is taken, and no step with it yet."""
        return self._stepped is not None

    def gradient_of(self, p: Tensor) -> Tensor | None:
        """This rank's gradient of ``p`` as backward has summed it, before the mean; it may be changed."""
        return self._gradients.of(p)

    def gradients(self) -> list[Tensor]:
        """This rank's chunks of the mean gradients, to change in place; after ``reduce_gradients``."""
        return [c.value.grad for c in self._stepped or () if c.value.grad is not None]

    def norm(self, p: float = 2.0) -> Tensor:
        """The norm of the full mean gradient, as of ``clip_grad_norm``; after ``reduce_gradients``."""
        chunks = [chunk for parameter, chunk in self._chunks.items() if parameter.requires_grad]
        device = next((parameter.device for parameter in self._chunks), None)
        if current().reproducible is not None and p != float("inf"):
            return norm_in_order(((chunk.parameter, chunk.gradient()) for chunk in chunks), p, device)
        comms = sorted({chunk.dp for chunk in chunks} | {self._dp}, key=lambda comm: comm.group.axes)
        norms = [norm_of([chunk.addend(p) for chunk in chunks if chunk.dp is dp], p, device, dp) for dp in comms]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), p)

    @property
    def averaged(self) -> set[Tensor]:
        """All parameters, if their gradients are elsewhere than in ``.grad``, or their mean is to be taken."""
        elsewhere = self._gradients.sums or any(data_comm(p).size > 1 for p in self._parameters)
        return set(self._parameters) if elsewhere else set()

    @property
    def scaled(self) -> Any:
        """What a GradScaler takes for the optimizer: the groups of chunks with their gradients, and the step."""
        return SimpleNamespace(step=self.step, param_groups=self.base().param_groups)

    def clip(self, max_norm: float, p: float) -> Tensor:
        """``clip_grad_norm`` of the mean gradients, which it takes."""
        self.reduce_gradients()
        norm = self.norm(p)
        scale_to(self.gradients(), norm, max_norm)
        return norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the mean over dp if that is not done yet, step this rank's chunks, gather the new weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None:
            raise ValueError(
                "scaler.step(optimizer) would let each rank decide by its own gradients whether to skip: "
                "tpcore.optimizer_step(optimizer, scaler=scaler) decides once for all ranks"
            )
        self.reduce_gradients()
        base = self.base()
        base.step()
        _copy_options(base.param_groups, self.param_groups)
        for bucket in in_buckets(self._stepped or (), lambda p: p.dtype, self._bucket):
            local = torch.cat([segment.of_value() for segment in bucket])
            gathered = bucket[0].chunk.dp.all_gather(local.unsqueeze(0), 0)
            for segment, part in zip(bucket, gathered.split([s.length for s in bucket], 1), strict=True):
                segment.chunk.put(segment.start, part)
        self.skip()
        self._show_state(base)
        return loss

    # makes GradScaler call step on every rank, inf or not, so that step can raise its error
    _step_supports_amp_scaling = True

    def skip(self) -> None:
        """Drop the mean of the gradients without a step."""
        for chunk in self._stepped or ():
            chunk.free()
        self._stepped = None

    def _show_state(self, base: torch.optim.Optimizer) -> None:
        """Set ``state``, by this optimizer's own parameters, to this rank's chunks and master values."""
        self.state = defaultdict(dict)
        for p, chunk in self._chunks.items():
            values = dict(base.state.get(chunk.value, {}))
            if chunk.master is not None:
                values[MASTER] = chunk.master
            if values:
                self.state[p] = values

    def _in_step(self) -> bool:
        """Whether this rank has gradients that no step has used."""
        trained = (p for p in self._parameters if p.requires_grad and p.numel())
        return self.reduced or any(self._gradients.of(p) is not None for p in trained)

    def outline(self) -> Outline:
        """The ``state_dict`` without the tensors that are sharded over dp, which can be gathered one by one."""
        if self._base is not None:
            self.base()  # raises if parameters have changed
        if self._in_step():
            raise ValueError(IN_STEP)
        return outline_of(super().state_dict(), self._parameters, self._chunks)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of ``optimizer_class`` for this tp rank's shards, with ``master`` values if any.

        Collective over dp. Every rank gets the whole state; ``tpcore.checkpoint.save`` takes the optimizer
        itself and gathers one tensor at a time. ValueError if a dp rank has gradients that no step has used.
        """
        if any(present_anywhere([self._in_step()], self._dp, self._dp.position.device)):
            raise ValueError(IN_STEP)  # on all dp ranks, which gather together
        return self.outline().gathered()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of ``optimizer_class`` or of ``Zero1`` over it, for this tp rank's shards. Without
        ``master`` values in it they start from the weights. ValueError if it does not fit the parameters."""
        self.load_outline(state_dict, {})

    @torch.no_grad()
    def load_outline(self, outline: dict[str, Any], runs: Mapping[int, ReadRun]) -> None:
        """Like ``load_state_dict``, but reads the values of tensors on meta now: each rank its entries. ``runs``: the
        reader of each, by ``id``."""
        base = self.base()
        saved = renumbered(outline, self.param_groups, {})
        check_kind(self._class, self.defaults, saved, self._parameters)
        state, masters = entries_of(saved, self._parameters, self._chunks, self._entries, runs)
        base.load_state_dict(state)
        for p, chunk in self._chunks.items():
            chunk.take_master(masters.get(p))
        _copy_options(base.param_groups, self.param_groups)
        self._show_state(base)


def _copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for group, target_group in zip(source, target, strict=True):
        target_group.update({k: v for k, v in group.items() if k not in ("params", "param_names")})
