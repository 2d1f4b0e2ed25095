"""Tracing on one rank: makes the model a function of weights and inputs, and the function a program."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...checkpoint.storage.files import MANIFEST, write_file, written_by
from ...checkpoint.storage.tensorfile import bytes_of
from ...errors import BackendError
from ...layers.sharding import sharding
from ...layout.shard import ShardSpec
from ...log import inform
from ...runtime.consensus import agree, gather, gather_bytes
from ...runtime.context import ParallelContext
from ...runtime.init import init, shutdown
from ..artifact import (
    PROGRAMS,
    OutputSpec,
    TracedFile,
    TraceManifest,
    Weight,
    program_dir,
    record_of,
    weights_file,
    write_weights,
)
from ..inputs import Arguments, Inputs, Structure, put_together, take_apart
from .dynamic import by_example, declared, output_shapes

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


@dataclass(frozen=True)
class Order:
    """The model to trace, and how. ``examples``: one call, or one per bucket, smallest first."""

    func: Callable[[], Any]
    examples: Sequence[CallArguments]
    dynamic_shapes: Any
    backend: str
    tp: int
    folder: Path
    save_id: str


class Traced(NamedTuple):
    inputs: Inputs
    outputs: OutputSpec
    weights: dict[str, Weight]
    file: TracedFile


def trace_rank(order: Order) -> Traced:
    ctx = init(order.backend, order.tp)
    try:
        return Tracer(order, ctx).trace()
    finally:
        shutdown()


def assembled(order: Order, ranks: Sequence[Traced], pad_value: float | Mapping[str, float]) -> TraceManifest:
    """Write the manifest, which makes the files of all ranks one traced model."""
    first = ranks[0]
    names = first.inputs.arguments.names
    pads = dict(pad_value) if isinstance(pad_value, Mapping) else dict.fromkeys(names, pad_value)
    if unknown := pads.keys() - set(names):
        raise ValueError(f"pad_value: no inputs {sorted(unknown)}; there are {names}")
    files = {weights_file(Path(), r).as_posix(): rank.file for r, rank in enumerate(ranks)}
    for path in sorted(p for p in (order.folder / PROGRAMS).rglob("*") if p.is_file()):
        files[path.relative_to(order.folder).as_posix()] = record_of(path)
    of_all = first.inputs, first.outputs, pads, first.weights, files
    manifest = TraceManifest(order.backend, order.tp, *of_all, written_by(), order.save_id)
    write_file(str(order.folder / MANIFEST), [manifest.to_json()])
    return manifest


@dataclass
class _Function:
    """The model as a function of named weights and input tensors. Records the form of the output.
    ``returned_state``: positions of the outputs that become weights."""

    model: nn.Module
    arguments: Arguments
    returned_state: tuple[int, ...]
    form: Structure = field(default_factory=dict)
    shapes: list[list[int]] = field(default_factory=list)

    def __call__(self, weights: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        arguments = put_together(self.arguments.form, inputs)
        bound = inspect.BoundArguments(inspect.signature(self.model.forward), arguments)
        out = torch.func.functional_call(self.model, dict(weights), bound.args, bound.kwargs)
        if state := [out[i] for i in self.returned_state]:
            out = tuple(value for i, value in enumerate(out) if i not in self.returned_state)
        leaves, self.form = take_apart(out, "the output")
        self.shapes = [list(t.shape) for t in leaves]
        return leaves + state


class Tracer:
    """Traces on one rank of ``ctx``; collective."""

    def __init__(self, order: Order, ctx: ParallelContext) -> None:
        self._order, self._ctx = order, ctx

    def trace(self) -> Traced:
        self._say("building the model")
        model, aliases = self._built()
        model.eval()
        weights, described = self._weights(model)
        weights = {name: t.to(self._ctx.device) for name, t in weights.items()}
        self._check_replicas(weights, described)
        bound = [Arguments.of(model.forward, *call) for call in self._order.examples]
        arguments, examples = bound[0][0], [leaves for _, leaves in bound]
        if any(other != arguments for other, _ in bound):
            raise ValueError("bucket_inputs: the examples differ in more than the sizes of their tensors")
        names = {t: name for name, t in (*model.named_parameters(), *model.named_buffers())}
        if missing := [i for t, i in aliases.items() if t not in names]:
            raise ValueError(f"aliases: what outputs {missing} become is no parameter or buffer of the model")
        several, options = len(examples) > 1, self._order.dynamic_shapes
        sizes = by_example(arguments, examples) if several else declared(options, arguments, examples[0])
        inputs = Inputs(arguments, tuple(t.dtype for t in examples[0]), *sizes)
        seen: list[tuple[Structure, list[list[int]]]] = []
        for number, leaves in enumerate(examples):
            self._say("tracing" + (f" for {[list(t.shape) for t in leaves]}" if inputs.buckets else ""))
            fn = _Function(model, arguments, tuple(aliases.values()))
            seen.append(self._program(fn, weights, leaves, inputs, number))
        self._say("writing weights")
        record = write_weights(self._order.folder, self._ctx.rank, weights, self._order.save_id)
        shapes = output_shapes([shapes for _, shapes in seen], inputs.buckets)
        outputs = OutputSpec(seen[0][0], shapes, tuple(names[t] for t in aliases))
        return Traced(inputs, outputs, described, record)

    def _say(self, doing: str) -> None:
        inform(f"trace: rank {self._ctx.rank} of {self._order.tp}: {doing}")

    def _built(self) -> tuple[nn.Module, dict[Tensor, int]]:
        built = self._order.func()
        model, aliases = built if isinstance(built, tuple) and len(built) == 2 else (built, {})
        if not isinstance(model, nn.Module):
            kind = type(built).__name__
            raise TypeError(f"the function to trace returned a {kind}; it must return the model, or (model, aliases)")
        return model, dict(aliases or {})

    def _weights(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Weight]]:
        """All parameters and buffers, including those not in the state_dict. Tied tensors appear once."""
        named: dict[Tensor, list[str]] = {}  # tensors are keys by identity
        for tensors_of in (model.named_parameters, model.named_buffers):
            for name, t in tensors_of(remove_duplicate=False):
                if t.is_meta:
                    raise ValueError(f"{name!r} is on the meta device: load weights before the function returns")
                named.setdefault(t, []).append(name)
        described = {}
        saved = model.state_dict().keys()
        for t, (first, *others) in named.items():
            mark = sharding(t)
            spec = mark.layout.spec if mark else ShardSpec(tuple(t.shape))
            described[first] = Weight(spec, t.dtype, tuple(others), not saved.isdisjoint([first, *others]))
        return {names[0]: t.detach() for t, names in named.items()}, described

    def _check_replicas(self, weights: Mapping[str, Tensor], described: Mapping[str, Weight]) -> None:
        """ValueError if weights that are not cut differ between ranks, which would be different models."""
        same = [name for name in weights if described[name].spec.dim is None]
        sums = {name: zlib.crc32(bytes_of(weights[name].cpu().contiguous())) for name in same}

        def error(rank: int, first: dict[str, int], other: dict[str, int]) -> ValueError:
            name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
            return ValueError(
                f"{name!r} is not sharded, and ranks 0 and {rank} hold different values: load a "
                "checkpoint, or seed (torch.manual_seed) before the model is built. If it is a rank's own part, let "
                "the model keep the whole tensor as a buffer and take tpcore.comm.mappings.scatter(whole, comm, dim)"
            )

        agree(gather(sums, self._ctx.world), error)

    @torch.no_grad()
    def _program(
        self, fn: _Function, weights: Mapping[str, Tensor], leaves: Sequence[Tensor], inputs: Inputs, number: int
    ) -> tuple[Structure, list[list[int]]]:
        """Trace one program, and check that it computes the same outputs as the model: their form and shapes."""
        # copies: one tensor given as two inputs would become one input of the program, which reads it twice
        leaves = [t.to(self._ctx.device, copy=True) for t in leaves]
        folder = program_dir(self._order.folder, number)
        folder.mkdir(parents=True, exist_ok=True)
        dims = [
            {} if inputs.buckets else {at: inputs.dims[m] for at, m in enumerate(shape) if isinstance(m, str)}
            for shape in inputs.shapes
        ]
        before = {name: t.clone() for name, t in weights.items() if name in dict(fn.model.named_buffers())}

        def restored() -> Mapping[str, Tensor]:
            for name, t in before.items():
                weights[name].copy_(t)
            return weights

        expected = [t.to("cpu", copy=True) for t in fn(weights, leaves)]
        form, shapes = fn.form, fn.shapes
        self._ctx.backend.trace(fn, restored(), leaves, dims, folder)
        gather_bytes(b"written", self._ctx.world)
        program = self._ctx.backend.load_program(folder, restored())
        outputs = [t.to("cpu", copy=True) for t in program(leaves)]  # an output may be a buffer, written in place
        restored()
        for i, (a, b) in enumerate(zip(outputs, expected, strict=True)):
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True):
                worst = float((a.double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")
                raise BackendError(
                    f"output {i} of the traced program differs from the model's by {worst:.3g}: something in "
                    "the model's forward does not survive tracing"
                )
            if i < len(shapes):  # the outputs after these are state, which may be sharded
                self._check_returned(i, a)
        return form, shapes

    def _check_returned(self, i: int, t: Tensor) -> None:
        """ValueError if ranks return different outputs: a caller gets only those of the first rank."""
        outputs = self._ctx.world.all_gather(t.unsqueeze(0).to(self._ctx.device), 0).cpu()
        for rank, output in enumerate(outputs):
            if not torch.allclose(output, outputs[0], rtol=1e-3, atol=1e-4, equal_nan=True):
                raise ValueError(
                    f"output {i}, of shape {list(t.shape)}, is another on rank {rank} than on rank 0, whose "
                    "outputs are returned: gather it (gather_output=True in a last ColumnParallelLinear)"
                )
