"""Records one training step of one rank: forward, backward, reduction over dp, clipping, the optimizer."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tpcore import nested
from tpcore.backend.registry import check_fits
from tpcore.checkpoint.storage.tensorfile import nbytes_of
from tpcore.comm.signature import library
from tpcore.layers.module import move_model_to_device
from tpcore.layers.sharding import sharding
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext, current, in_eager_mode, use
from tpcore.runtime.digests import Note
from tpcore.train.clip import scale_to
from tpcore.train.pipeline import PipelinedLayers, Schedule
from tpcore.train.step import stepping_of

from .checked import Checks
from .recording import Collective, Recorder, RecordingBackend
from .target import ModelInputs

Build = Callable[[], tuple[nn.Module, ModelInputs]]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Watch = Callable[[Recorder, nn.Module, ModelInputs], AbstractContextManager[None]]


@dataclass(frozen=True)
class Parameter:
    """One rank's part of a parameter, with the bytes of it, of its gradient and of its optimizer state."""

    name: str
    layer: str  # the class of the module that owns it
    shape: tuple[int, ...]  # of this rank's part, padding included
    full: tuple[int, ...]
    dtype: str
    cut: bool
    nbytes: int
    gradient: int  # 0 if the step computes none
    optimizer: int


@dataclass(frozen=True)
class StageCost:
    """One stage of a pipeline. Bytes are those of one step."""

    name: str  # of the PipelinedLayers in the model
    stage: int
    stages: int
    microbatches: int
    layers: tuple[str, ...]  # numbers of the layers that the stage runs
    bubble: float  # the fraction of ticks without a microbatch
    input_bytes: int  # of one microbatch's input; a stage sends as much to the next one at each tick
    kept: int  # bytes of inputs kept for backward, with recomputation
    kept_lockstep: int  # the same for the one-forward-one-backward schedule
    sent: int  # bytes sent: to the next stage in forward, to the previous one in backward

    @classmethod
    def of(cls, name: str, layers: PipelinedLayers, x: Tensor) -> StageCost:
        schedule = Schedule(layers.pp.size, layers.num_microbatches)
        nbytes = nbytes_of(x) // schedule.microbatches
        numbers = tuple(number for number, _ in layers.named_children())
        at = layers.stage.place, schedule.stages, schedule.microbatches, numbers, schedule.bubble
        sent = 2 * (schedule.ticks - 1) * nbytes if schedule.stages > 1 else 0
        return cls(name, *at, nbytes, schedule.ticks * nbytes, schedule.inputs_held * nbytes, sent)


@dataclass(frozen=True)
class Program:
    """The parameters and collectives of one rank in a step. Equal for ranks that do the same."""

    model: str  # the class name
    parameters: tuple[Parameter, ...]
    collectives: tuple[Collective, ...]
    pipelines: tuple[StageCost, ...] = ()
    routes: tuple[tuple[str, str], ...] = ()
    """(layer of experts, how tokens come to those of other ranks and why), and what context parallelism costs."""
    mistakes: tuple[str, ...] = ()
    """Places where the step computes something else than the whole model would."""


def record(
    build: Build,
    mesh: Mesh,
    rank: int,
    *,
    dtype: torch.dtype | None,
    optimizer: MakeOptimizer | None,
    max_norm: float | None,
    meter: Watch | None = None,
) -> tuple[Program, tuple[Note, ...]]:
    """A step of this rank's model on meta tensors, and notes of what all ranks of a tp group should have alike.
    ``optimizer``: None: only forward and backward. ``meter``: entered with the recorder, the model and its inputs."""
    recorder = Recorder()
    backend = RecordingBackend(rank, mesh.size, recorder)
    check_fits(backend, mesh)
    checks = Checks(recorder.mistake if meter is None else None)  # a meter is for what a step costs
    ctx = ParallelContext(backend, mesh, rank, checks)
    rng, meta = torch.random.fork_rng(devices=[]), torch.device("meta")
    with use(ctx), in_eager_mode(), rng, _explain_errors(rank, recorder), meta, _Counts():
        recorder.phase = "building"
        model, inputs = build()
        for i, t in enumerate(nested.tensors(inputs)):
            checks.same(f"input {i}", t, f"of {type(model).__name__}")
        move_model_to_device(model, "meta")
        if dtype is not None:
            model.to(dtype)
        recorder.phase = "forward"
        with nullcontext() if meter is None else meter(recorder, model, inputs):
            with recorder.watch(model):
                loss = _loss(model, inputs, dtype)
                recorder.phase = "backward"
                loss.backward()
            gradients = {id(p): nbytes_of(p.grad) for p in model.parameters() if p.grad is not None}
            state = {} if optimizer is None else _update(model, recorder, optimizer, max_norm).state
        experts = ((name, str(m.route)) for name, m in model.named_modules() if getattr(m, "route", None))
        routes = (*_context_route(model, inputs), *experts)
    owners = {id(p): type(m).__name__ for m in model.modules() for p in m.parameters(recurse=False)}
    parameters = tuple(_info(n, p, owners[id(p)], gradients.get(id(p), 0), state) for n, p in model.named_parameters())
    stages = tuple(StageCost.of(name, *pipeline) for name, pipeline in recorder.pipelines.items())
    fields = parameters, tuple(recorder.calls), stages, routes, tuple(recorder.mistakes)
    return Program(type(model).__name__, *fields), tuple(checks.notes)


class _Counts(TorchFunctionMode):
    """Counts of values by ``bincount``, of which torch knows no shape without values. Where a caller says of how many
    values they are, as losses of routers say of experts in transformers before 5.23, it is this number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts = func in (torch.bincount, Tensor.bincount) and kwargs.keys() == {"minlength"} and args[0].is_meta
        if counts and kwargs["minlength"]:
            return args[0].new_empty(kwargs["minlength"], dtype=torch.int64)
        return func(*args, **kwargs)


def _context_route(model: nn.Module, inputs: ModelInputs) -> Iterator[tuple[str, str]]:
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if isinstance(ids, Tensor) and "cp" in current().mesh.axes:
        from tpcore_hf.sequence.context_parallel import context_costs

        costs = context_costs(model, ids.shape[1])
        if costs is not None:
            yield "context_parallel", costs


def _update(
    model: nn.Module, recorder: Recorder, make_optimizer: MakeOptimizer, max_norm: float | None
) -> torch.optim.Optimizer:
    """Reduce, clip and step."""
    recorder.phase = "making the optimizer"
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    stepping = stepping_of(optimizer)
    recorder.phase = "reduction"
    stepping.reduce_gradients()
    if max_norm is not None:
        recorder.phase = "clipping"
        scale_to(stepping.gradients(), stepping.norm(), max_norm)
    recorder.phase = "optimizer"
    with torch.device("cpu"):  # torch's optimizers keep their step count there
        optimizer.step()
    return optimizer


def _loss(model: nn.Module, inputs: ModelInputs, dtype: torch.dtype | None) -> Tensor:
    """The result of ``inputs`` if it is a function, else the model's own loss, else the sum of outputs."""
    if callable(inputs) and not isinstance(inputs, Tensor):
        scalar = inputs(model)
        if not isinstance(scalar, Tensor) or scalar.numel() != 1:
            raise ValueError(f"the loss function returned {_kind(scalar)}, not a tensor of one element")
        return scalar
    batch = dict(inputs) if isinstance(inputs, Mapping) else inputs  # of transformers there are mappings of other kinds
    meta_batch = nested.mapped(lambda t: t.to("meta", dtype if t.is_floating_point() else None), batch)
    if isinstance(meta_batch, Mapping):
        out = model(**meta_batch)
    else:
        out = model(*meta_batch) if isinstance(meta_batch, tuple | list) else model(meta_batch)
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    parts = [t.sum() for t in nested.tensors(out) if t.requires_grad]
    if not parts:
        raise ValueError(f"{type(model).__name__} returned {_kind(out)}, none of it with a gradient")
    return torch.stack([p.float() for p in parts]).sum()


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _info(name: str, p: nn.Parameter, layer: str, gradient: int, state: Mapping[Any, Any]) -> Parameter:
    placement, dtype = sharding(p), str(p.dtype).removeprefix("torch.")
    full, cut = (tuple(p.shape), False) if placement is None else (placement.layout.shape, bool(placement.axes))
    state_bytes = sum(map(nbytes_of, nested.tensors(state.get(p, {}))))
    return Parameter(name, layer, tuple(p.shape), full, dtype, cut, nbytes_of(p), gradient, state_bytes)


@contextmanager
def _explain_errors(rank: int, recorder: Recorder) -> Iterator[None]:
    """Explain torch's errors about missing values by a ValueError; note phase, module and line with others."""
    try:
        yield
    except Exception as e:
        frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith((*library(), "<"))]
        at = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        if "process group has not been initialized" in str(e):
            raise ValueError(
                f"rank {rank} needs torch.distributed's default group{at}, and a recorded step has none. "
                "DistributedDataParallel over all ranks would take the parts of tp ranks for copies: explain "
                "the model without it. In the job pass process_group=ctx.comm('dp').process_group, or leave "
                "DistributedDataParallel out and call tpcore.optimizer_step"
            ) from e
        if not isinstance(e, RuntimeError | NotImplementedError) or "meta" not in str(e).lower():
            module = f", module {recorder.failed.module}" if recorder.failed else ""
            if module or at:
                notes = getattr(e, "__notes__", [])  # Python 3.10 has no add_note
                vars(e)["__notes__"] = [*notes, f"rank {rank}, {recorder.phase}{module}{at}"]
            raise
        raise ValueError(
            f"rank {rank} reads a value{at}, and a recorded step has none: it runs on meta tensors, which "
            "have shapes only. Compute values that the model needs while it is built with device='cpu', and "
            f"read no values in forward: a lazy backend would stop there as well. torch says: {e}"
        ) from e
