"""PipelinedLayers: replaces a model's list of layers, and runs as a pipeline in the model's own forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import mappings as ops
from ...layers.module import ParallelModule
from ...layers.sharding import Sharding, sharding, stamp
from ...layout.layout import Layout, Slot
from ...runtime import random
from ...runtime.context import current
from ...runtime.digests import WHOLE_BATCH, are_read, compare_ranks
from .alike import check_layers, check_own_parameters, ends_of, one_call_for_all
from .schedule import Recomputed, Schedule, is_microbatch, tick, where
from .stage import LayerArguments, StageLayers, check_count, check_divides, check_told_apart

Instead = Callable[[Tensor, LayerArguments], Tensor]


def copy_to_meta(layer: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, without values."""
    copies: dict[str, Tensor] = {name: torch.empty_like(t, device="meta") for name, t in layer.named_buffers()}
    for name, p in layer.named_parameters():
        copies[name] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
    return copies


class PipelinedLayers(nn.Module):
    """The layers of a model, divided over the pipeline stages. Each stage runs one microbatch after another.

    ``layers``: all layers of the model, equal in structure, and as many for each stage. Those of other stages are
    dropped, and the rest keep their numbers, so that parameters have the names of the unsharded model. A forward that
    loops over the layers, or over a slice of all, finds one layer, the whole pipeline:
    ``model.layers = tpcore.PipelinedLayers(model.layers, num_microbatches=8)`` is the only change needed.

    It is called like a layer. The first argument, ``[batch, ...]``, and the result are the same on all stages. The
    argument is cut along dim 0 into ``num_microbatches``, as are tensors in other arguments whose dim 0 has the same
    size, except those that ``shared`` names; it is required if their dim 0 could have that size for another reason.
    Gradients are those of the layers run in sequence.

    ``recompute``: keep only the input of each microbatch, and run the layers again in backward. ``cut_programs``: on
    lazy backends each tick ends a program, so that one program serves all microbatches and no compiler merges the
    recomputation with the first computation. ``layers_per_stage``: on eager backends, a number for each stage, whose
    layers need not be alike, or "balanced": those of which the largest stage has the fewest parameters.

    Dropout draws different numbers for each microbatch and stage, and the same ones in the recomputation. Raises
    ValueError for layers that differ, and for numbers of layers or examples that do not divide. In eval mode and
    without gradients one stage takes any batch, as in a traced model.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        num_microbatches: int,
        *,
        recompute: bool = True,
        shared: Collection[str] | None = None,
        cut_programs: bool = True,
        layers_per_stage: Sequence[int] | str | None = None,
    ) -> None:
        super().__init__()
        self.context = ctx = current()
        self.pp = ctx.comm("pp")
        all_layers = list(layers)
        self.num_layers, self.num_microbatches = len(all_layers), check_count(num_microbatches)
        self._ends: tuple[int, ...] = ()
        self.elsewhere: dict[str, dict[str, Tensor]] = {}
        """Shapes of other stages' layers, if these need not be like those here: parameters and buffers by name."""
        if layers_per_stage is None or not all_layers:
            check_layers(all_layers, self.pp.size)
        else:
            self._ends = ends_of(all_layers, layers_per_stage, self.pp.size)
            check_own_parameters(all_layers)
            if not self.pp.eager:
                raise ValueError(
                    f"layers_per_stage={layers_per_stage!r} on a lazy backend, where all stages run one program: leave "
                    "it out, and let pp divide the number of layers"
                )
        if self.pp.size > 1 or num_microbatches > 1:
            one_call_for_all(all_layers)
        self.recompute, self.shared, self.cut_programs = recompute, shared, cut_programs
        for i, layer in enumerate(all_layers):
            if self._slot(i).coordinate(ctx.mesh) == ctx.coord("pp"):
                self.add_module(str(i), layer)
            elif self._ends:
                self.elsewhere[str(i)] = copy_to_meta(layer)
        self.stage = StageLayers(self._modules, ctx.coord("pp"))
        self._instead: Instead | None = None
        self._compared: set[str] = set()
        self.register_load_state_dict_post_hook(PipelinedLayers._loaded)
        self.mark_places()

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self,))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int | slice) -> nn.Module:
        if isinstance(index, slice):
            if range(self.num_layers)[index] == range(self.num_layers):
                return self
        elif index in (0, -1):
            return self
        raise ValueError(
            f"{index} of {self.num_layers} pipelined layers: they run as one, so that a forward "
            "may loop over all of them and not over some"
        )

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads from a layer before it calls it: those of the first layer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            first = next(self.children(), None) if "_modules" in self.__dict__ else None
            if first is None or name.startswith("_"):
                raise
            return getattr(first, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x, arguments = self._arguments(args, kwargs)
        run = self._run if self._instead is None else self._instead
        if self._instead is None:  # an engine has compared its batch
            self.compare({"the input of PipelinedLayers": x}, "input")
        y = run(x, arguments)
        if self._instead is None and self.pp.size > 1 and y.requires_grad:
            # the stages' labels, of which the layers see no more than this
            name = "the gradient of the output of PipelinedLayers"
            y.register_hook(lambda gradient: self.compare({name: gradient}, "gradient"))
        return (y,) if self.stage.tuples else y

    def compare(self, tensors: Mapping[str, Tensor], kind: str) -> None:
        """Compare what the stages need alike, and get from the program: once, in a checked run each time."""
        if self.pp.size == 1 or not are_read(tensors, self.pp):
            return
        if kind not in self._compared or self.context.observer is not None:
            self._compared.add(kind)
            compare_ranks(tensors, self.pp, "stages {} and {} of a pipeline", f"every stage {WHOLE_BATCH}")

    def _run(self, x: Tensor, arguments: LayerArguments) -> Tensor:
        if self.pp.size == 1 and not (self.training or torch.is_grad_enabled()):
            return self.stage(x, arguments)  # a batch of any size; microbatches would save no memory
        count = check_divides(len(x), self.num_microbatches)
        if self.shared is None and count > 1:
            check_told_apart(arguments, x)
        return self._fill_drain(x, arguments, Schedule(self.pp.size, count), self.seed())

    def _fill_drain(self, x: Tensor, arguments: LayerArguments, schedule: Schedule, seed: int | None) -> Tensor:
        """The output for a batch, the same on every stage: of all microbatches, and then autograd's backward of all.

        GPipe (Huang et al. 2019, arXiv:1811.06965) as one program for all ranks: at every tick each stage runs its
        layers, and a permutation of the ring moves their output to the next stage.
        """
        first, last = self.pp.position == 0, self.pp.position == self.pp.size - 1
        # only stage 0 uses the input, so its gradient is summed over stages; all stages use the arguments
        feeds = list(ops.copy(x, self.pp).chunk(schedule.microbatches))
        stage_arguments = arguments.mapped(lambda t, name: ops.copy(t, self.pp) if t.requires_grad else t)
        if self.cuts:  # in buffers of their own, a tick's program does not know which it reads
            feeds = [feed.clone() for feed in feeds]
            self.end_program()
        # real activations in the bubble too: a norm of zeros may be NaN
        state, outputs = feeds[0], []
        for t in range(schedule.ticks):
            feed = feeds[schedule.entering(t)]
            number = tick(t, x) - self.pp.position
            index = number.clamp(0, schedule.microbatches - 1)
            call = self.stage.run(
                partial(stage_arguments.microbatch, index, schedule.microbatches, len(x), self.shared),
                seed,
                schedule.forward_of(t)[self.stage.place],
                partial(is_microbatch, number, schedule.microbatches),
                check=t == 0,
            )
            y = self._tick(call, feed if self.pp.size == 1 else where(first, feed, state), stage_arguments)
            if schedule.leaving(t) is not None:
                outputs.append(y)
            if t + 1 < schedule.ticks:
                state = ops.shift(y, self.pp)
            if self.cuts:
                self.end_program()
        out = torch.cat(outputs)
        return out if self.pp.size == 1 else ops.reduce(where(last, out, torch.zeros_like(out)), self.pp)

    def _tick(self, call: Callable[[Tensor], Tensor], x: Tensor, arguments: LayerArguments) -> Tensor:
        """The output of ``call``, this stage on one microbatch, for ``x``."""
        if not torch.is_grad_enabled():
            return call(x)
        if self.cuts and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: self.end_program())
        if not self.recompute:
            return call(x)
        used = [t for t in (*arguments.tensors(), *self.parameters()) if t.requires_grad]
        y: Tensor = Recomputed.apply(call, x, *used)
        return y

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LayerArguments]:
        """The first argument, which is the input of the first layer, and the other arguments."""
        names = list(inspect.signature(next(self.children()).forward).parameters)
        names += [f"argument {i}" for i in range(len(names), len(args))]
        if args:
            return args[0], LayerArguments(tuple(names[1:]), args[1:], kwargs)
        rest = dict(kwargs)
        if names[0] not in rest:
            raise TypeError(f"pipelined layers are called without {names[0]!r}, their input")
        return rest.pop(names[0]), LayerArguments((), (), rest)

    @contextmanager
    def instead(self, run: Instead) -> Iterator[None]:
        """Inside the block a call of the layers calls ``run`` instead of the pipeline."""
        self._instead = run
        try:
            yield
        finally:
            self._instead = None

    @property
    def cuts(self) -> bool:
        """Whether each tick ends a program: on lazy backends, unless ``cut_programs`` is off."""
        return self.cut_programs and not self.pp.eager

    def end_program(self) -> None:
        self.context.backend.mark_step()

    def seed(self) -> int | None:
        """The seed for one run of the pipeline; None in eval mode, where layers draw no numbers."""
        return random.draw() if self.training else None

    def _slot(self, number: int) -> Slot:
        return Slot("pp", number, self.num_layers, self._ends)

    def mark_places(self) -> None:
        """Mark parameters and buffers with their stage. Call it again after they are replaced."""
        if self.pp.size == 1:
            return
        self.context.layers.add(self)
        for number, layer in self.named_children():
            for module in layer.modules():
                if isinstance(module, ParallelModule):
                    module.place(self._slot(int(number)))
            for t in (*layer.parameters(), *layer.buffers()):
                self._stamp(t, number)

    def _loaded(self, _: object) -> None:
        self.mark_places()

    def _stamp(self, t: Tensor, number: str) -> None:
        """Mark a tensor of no parallel layer as whole and on this stage only."""
        mark = sharding(t)
        if mark is None or mark.layout.slot is None:
            stamp(t, Sharding(Layout(tuple(t.shape), slot=self._slot(int(number))), self.context))

    def _apply(self, fn: Any, recurse: bool = True) -> PipelinedLayers:
        super()._apply(fn, recurse)
        self.mark_places()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.mark_places()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, t in state.items() if self.pp.size > 1 else ():
            number = name.removeprefix(prefix).partition(".")[0]
            if name.startswith(prefix) and number in self._modules and isinstance(t, Tensor):
                self._stamp(t, number)
        return state

    def extra_repr(self) -> str:
        numbers = ", ".join(name for name, _ in self.named_children())
        return f"{numbers} of {self.num_layers} layers, pp={self.pp.size}, num_microbatches={self.num_microbatches}"
