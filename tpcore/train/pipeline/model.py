"""PipelineModel: an engine that runs forward and backward of a model's training step, one forward, one backward.

A tick runs the forward of one microbatch on each stage and the backward of another one, which it recomputes
from the stage's input. Inputs are stored by tick, in the same way on all ranks; data selects a stage's input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...comm.order import tree
from ...layers.adopt import become
from ...runtime import random
from ...runtime.gradients import TreeSum, held, sums_of
from .alike import find_layers
from .layers import PipelinedLayers
from .schedule import Backward, Schedule, is_microbatch, tick, where
from .stage import LayerArguments, check_count, chosen, microbatches


class _AtLayers(Exception):
    """Raised to leave a model's forward at the call of its layers."""


def loss_of(out: Any, model: str) -> Tensor:
    """The loss in what a model returned. ValueError if there is none of one element."""
    loss = getattr(out, "loss", None)
    if loss is None and isinstance(out, tuple | list) and out:
        loss = out[0]
    loss = out if isinstance(out, Tensor) else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"{model} returned no loss of one element, but a {type(out).__name__}: give it labels, or return the loss"
        )
    return loss.reshape(())


class Lockstep:
    """One run of an engine over all microbatches of a batch. The parameters' gradients become those of the sum of the
    scaled losses."""

    def __init__(
        self, engine: PipelineModel, batches: list[LayerArguments], seed: int | None, weight: float, *, train: bool
    ) -> None:
        """``weight``: of a microbatch's loss in the batch's."""
        self._engine, self._stage, self._pp = engine, engine.layers.stage, engine.layers.pp
        self._batches, self._seed, self._weight, self._train = batches, seed, weight, train
        pp, self._schedule = self._pp, Schedule(self._pp.size, len(batches))
        self._first, self._last = pp.position == 0, pp.position == pp.size - 1
        self._ring = [(i + 1) % pp.size for i in range(pp.size)]
        self._back = [(i - 1) % pp.size for i in range(pp.size)]
        self.inputs: dict[int, Tensor] = {}  # the stored ones, by tick
        self._arguments: dict[int, LayerArguments] = {}  # by microbatch
        self._entered: dict[int, Backward] = {}  # by microbatch
        self._forward: Tensor | None = None  # the activation received from the previous stage
        self._gradient: Tensor | None = None  # the gradient received from the next stage
        self._losses: list[Tensor] = []
        inside = set(engine.layers.parameters())
        self._inside = sums_of(inside)
        self._outside = sums_of(p for p in engine.model.parameters() if p not in inside)
        self._held: dict[int, dict[TreeSum, Tensor]] = {}
        """By microbatch, the gradients outside of the layers: the backward before these comes later than that behind
        them, in turns with other microbatches', and the two are one number of the sums."""

    def run(self, end_tick: Callable[[], None]) -> Tensor:
        """The sum of the losses. ``end_tick`` is called at the end of each tick."""
        schedule = self._schedule
        for t in range(schedule.step_ticks if self._train else schedule.ticks):
            out = None
            if t < schedule.ticks:
                y = self._run_forward(t)
                out = self._run_loss(y, schedule.leaving(t))
            if self._train and t >= schedule.stages - 1:
                self._run_backward(t, out)
            self._forget(t)
            end_tick()
        return tree(self._losses)

    def _call(self, m: int) -> Any:
        """Call the model on a microbatch; every call draws the same random numbers."""
        batch, seed = self._batches[m], self._seed
        with nullcontext() if seed is None else random.seeded(random.mixed(seed, m)):
            return self._engine.model(*batch.positional, **batch.named)

    def _enter(self, microbatch: int) -> tuple[Tensor, LayerArguments]:
        """Run the model up to its layers, without gradients; return their input and other arguments."""
        seen: list[tuple[Tensor, LayerArguments]] = []

        def leave(x: Tensor, arguments: LayerArguments) -> Tensor:
            seen.append((x, arguments))
            raise _AtLayers

        with torch.no_grad(), self._engine.layers.instead(leave):
            try:
                self._call(microbatch)
            except _AtLayers:
                return seen[0]
        raise ValueError(f"the forward of {type(self._engine.model).__name__} does not call its pipelined layers")

    def _leave(self, microbatch: int, hidden: Tensor) -> tuple[Tensor, Backward]:
        """The loss for the layers' output ``hidden``, and the backward of the part before the layers."""
        entered: list[Backward] = []

        def pass_on(x: Tensor, arguments: LayerArguments) -> Tensor:
            if names := arguments.requiring_grad():
                raise ValueError(
                    f"the layers get {names[0]}, which takes a gradient that this engine does not send back: "
                    "call the model itself, whose PipelinedLayers do, and loss.backward()"
                )
            entered.append(Backward(x))
            return hidden

        with self._engine.layers.instead(pass_on):
            out = self._call(microbatch)
        if len(entered) != 1:
            raise ValueError(
                f"the forward of {type(self._engine.model).__name__} calls its pipelined layers {len(entered)} "
                "times, and one microbatch goes through them once"
            )
        return loss_of(out, type(self._engine.model).__name__) * self._weight, entered[0]

    @torch.no_grad()
    def _run_forward(self, t: int) -> Tensor:
        m = self._schedule.entering(t)
        if m in self._arguments:  # the bubble at the end, where any activations will do
            feed = self.inputs[max(self.inputs)]
        else:
            feed, self._arguments[m] = self._enter(m)
        x = feed if self._forward is None or self._pp.size == 1 else where(self._first, feed, self._forward)
        self.inputs[t] = x

        def counts() -> Tensor:
            return is_microbatch(tick(t, x) - self._pp.position, self._schedule.microbatches)

        y = self._run_stage(x, self._schedule.forward_of(t), counts, check=t == 0)
        self._forward = self._pp.permute(y, self._ring)
        return y

    def _run_stage(self, x: Tensor, numbers: list[int], counts: Callable[[], Tensor], *, check: bool = False) -> Tensor:
        """The layers' output, with the arguments of one of the microbatches ``numbers``, which are by stage."""

        def arguments() -> LayerArguments:
            return chosen([self._arguments[m] for m in numbers], self._pp, self._stage.place)

        return self._stage.run(arguments, self._seed, numbers[self._stage.place], counts, check=check)(x)

    def _run_loss(self, y: Tensor, m: int | None) -> Tensor | None:
        """Compute the loss of the microbatch that the last stage has finished, if any, and return the
        gradient of its output. All ranks do this, each with its part of the vocabulary."""
        if m is None:
            return None
        hidden = self._pp.broadcast(y, self._pp.size - 1).detach().requires_grad_(self._train)
        with torch.set_grad_enabled(self._train):
            loss, entered = self._leave(m, hidden)
        if self._train:
            self._entered[m] = entered
            scaler = self._engine.scaler  # scales alike on all ranks
            with held(self._outside, self._held.setdefault(m, {})):
                (loss if scaler is None else scaler.scale(loss)).backward()
        self._losses.append(loss.detach())
        return hidden.grad if hidden.grad is not None else torch.zeros_like(hidden)

    def _run_backward(self, t: int, out: Tensor | None) -> None:
        schedule, pp = self._schedule, self._pp
        x = self._input_of(t).detach().requires_grad_()
        with torch.enable_grad():
            y = self._run_stage(x, schedule.backward_of(t), lambda: tick(0, x))  # computed again, so that none counts
        idle = schedule.returned(t + self._stage.place) is None  # its zeros are no number of the sums
        with held(self._inside if idle else (), {}):
            torch.autograd.backward(y, self._gradient_at(t, out))
        grad = x.grad if x.grad is not None else torch.zeros_like(x)
        self._gradient = pp.permute(grad, self._back)
        m = schedule.returned(t)
        if m is not None:
            with held(self._outside, self._held[m]):
                self._entered.pop(m)(pp.broadcast(grad, 0))
            for of, gradient in self._held.pop(m).items():
                of.add(gradient)

    def _input_of(self, t: int) -> Tensor:
        """This stage's input of the microbatch whose backward it runs at tick ``t``: stage ``r`` ran its
        forward ``2 (stages - 1 - r)`` ticks ago."""
        stages, latest = self._pp.size, max(self.inputs)
        ages = [self.inputs.get(t - 2 * (stages - 1 - r), self.inputs[latest]) for r in range(stages)]
        if stages == 1:
            return ages[0]
        return torch.stack(ages).index_select(0, self._pp.position).squeeze(0)

    def _gradient_at(self, t: int, out: Tensor | None) -> Tensor:
        """The gradient of this stage's output: from the loss on the last stage, from the next stage on the
        others, and zero if there is no microbatch for backward."""
        gradients = [g for g in (self._gradient, out) if g is not None]
        grad = gradients[0] if len(gradients) == 1 else where(self._last, gradients[1], gradients[0])
        if self._pp.size == 1:
            return grad
        m = tick(t - 2 * (self._pp.size - 1), grad) + self._pp.position
        return where(is_microbatch(m, self._schedule.microbatches), grad, torch.zeros_like(grad))

    def _forget(self, t: int) -> None:
        """Drop inputs and arguments that no stage needs at later ticks."""
        oldest = t + 1 - 2 * (self._pp.size - 1) if self._train else t
        self.inputs = {at: x for at, x in self.inputs.items() if at >= oldest}
        self._arguments = {m: a for m, a in self._arguments.items() if m >= oldest - self._pp.size}


class PipelineModel:
    """Trains ``model`` with the one-forward-one-backward schedule. It keeps the stage inputs of at most
    ``2 pp - 1`` microbatches, whatever their number; on lazy backends a program is one tick.

    ``model``: returns its loss, as a tensor, as ``.loss`` or first in a tuple, and calls ``PipelinedLayers``
    once in its forward. If it has none yet, they replace its only ``nn.ModuleList``. Use
    ``model.named_parameters()`` for the optimizer and ``model.state_dict()`` for checkpoints, as usual.

    A batch is cut along dim 0 into ``num_microbatches``: every tensor whose dim 0 has the size of the first tensor's,
    except arguments that ``shared`` names. ``loss``: the loss of the batch is the ``"mean"`` of the microbatches'
    losses, or their ``"sum"``, e.g. if the model divides by a given number of tokens. The model's forward runs up to
    its layers, and then a second time with the layers' output; both runs draw the same random numbers.

    ``scaler``: scales each microbatch's loss before backward, but not the returned loss. Pass it
    to ``tpcore.optimizer_step`` too, and call its ``update`` afterwards.
    """

    def __init__(
        self,
        model: nn.Module,
        num_microbatches: int,
        *,
        loss: Literal["mean", "sum"] = "mean",
        shared: Collection[str] = (),
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if loss not in ("mean", "sum"):
            raise ValueError(f"loss must be 'mean' or 'sum' of the microbatches' losses, not {loss!r}")
        self.model, self.num_microbatches = model, check_count(num_microbatches)
        self.loss, self.shared, self.scaler = loss, frozenset(shared), scaler
        self.layers = pipelined_layers(model, num_microbatches)
        if (most := self.layers.context.reproducible) is not None and not self.layers.pp.eager:
            raise ValueError(
                f"PipelineModel with reproducible={most} on a lazy backend, where stages run one program, which adds "
                "zeros for ticks without a microbatch: use PipelinedLayers"
            )

    def run_train(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch; return its loss, detached and the same on every stage. Gradients of
        several runs accumulate. ``args`` and ``kwargs`` are the model's. Raises ValueError on all ranks for a batch
        that does not divide, or a model that no pipeline can run."""
        return self._run(args, kwargs, train=True)

    def run_eval(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a batch as in ``run_train``, without backward."""
        with torch.no_grad():
            return self._run(args, kwargs, train=False)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Tensor:
        layers, count = self.layers, self.num_microbatches
        arguments = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
        layers.compare({name: t for name, t in arguments.items() if isinstance(t, Tensor)}, "batch")
        batches = microbatches(args, kwargs, count, self.shared, copied=layers.cuts)
        end_tick = layers.end_program if layers.cuts else lambda: None
        end_tick()  # ends the only program that depends on the number of microbatches
        seed = layers.seed()
        weight = 1 / count if self.loss == "mean" else 1.0
        return Lockstep(self, batches, seed, weight, train=train).run(end_tick)


def pipelined_layers(
    model: nn.Module, num_microbatches: int, layers_per_stage: Sequence[int] | str | None = None
) -> PipelinedLayers:
    """The PipelinedLayers of ``model``. If it has none, they replace its only list of layers."""
    pipelined = [m for m in model.modules() if isinstance(m, PipelinedLayers)]
    if len(pipelined) > 1:
        raise ValueError(f"{type(model).__name__} has {len(pipelined)} PipelinedLayers; one engine runs one")
    if not pipelined:
        owner, name = find_layers(model)
        blocks: Any = owner.get_submodule(name)
        layers = PipelinedLayers(blocks.children(), num_microbatches, layers_per_stage=layers_per_stage)
        become(blocks, layers)
        vars(blocks)["_modules"] = vars(layers)["_modules"]
        pipelined = [blocks]
    return pipelined[0]
