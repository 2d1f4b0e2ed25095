"""Traced programs as torch.export makes them: a graph without weights, the same for all ranks."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from difflib import unified_diff
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Graph, Node

from tpcore.agree import gather_bytes
from tpcore.checkpoint.files import write_file
from tpcore.comm import Comm
from tpcore.errors import BackendError
from tpcore.program import Dims, DynamicDim, Function, Program

from .operators import NAMESPACE, axes_of, fast, recorded

GRAPH = "graph.pt2"
NAMES = "names.json"


class _Pure(nn.Module):
    """``fn`` with everything that it depends on as inputs, the ranks among them."""

    def __init__(self, fn: Function, names: Sequence[str], comms: Sequence[Comm]) -> None:
        super().__init__()
        self._of = fn, names, comms  # in a tuple, so that no module in it becomes a part of this one

    def forward(self, weights: list[Tensor], ranks: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        fn, names, comms = self._of
        with ExitStack() as stack:
            for comm, rank in zip(comms, ranks, strict=True):
                stack.enter_context(recorded(comm, rank))
            return fn(dict(zip(names, weights, strict=True)), inputs)


def trace(
    fn: Function,
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    dims: Dims,
    comms: Sequence[Comm],
    world: Comm,
    folder: Path,
) -> None:
    """``comms``: those that the program may use, one for each group."""
    names = sorted(weights)
    exported = _exported(fn, names, weights, inputs, dims, comms)
    _check_ranks(exported, world)
    if int(world.rank) == 0:
        buffer = io.BytesIO()
        torch.export.save(exported, buffer)
        write_file(str(folder / GRAPH), [buffer.getvalue()])
        said = {"weights": names, "groups": [axes_of(comm) for comm in comms]}
        write_file(str(folder / NAMES), [json.dumps(said).encode()])


def _exported(
    fn: Function,
    names: Sequence[str],
    weights: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    dims: Dims,
    comms: Sequence[Comm],
) -> ExportedProgram:
    known: dict[str, Any] = {}
    shapes = [{at: _dim(d, known) for at, d in of.items()} for of in dims]
    roomy = [_roomy(t, d) for t, d in zip(inputs, dims, strict=True)]
    example = ([weights[n] for n in names], [c.rank for c in comms], roomy)
    with torch.no_grad():
        made = torch.export.export(
            _Pure(fn, names, comms),
            example,
            dynamic_shapes=([None] * len(names), [None] * len(comms), shapes),
            strict=False,
        )
    for module in made.graph_module.modules():
        for node in getattr(module, "graph", Graph()).nodes:
            # the rest says where in whose source files an operation comes from
            node.meta = {k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")}
    made._example_inputs = None  # they would be pickled into the file
    return made


def _dim(dim: DynamicDim, known: dict[str, Any]) -> Any:
    return known.setdefault(dim.name, Dim(f"d{len(known)}", min=dim.min, max=dim.max))


def _roomy(t: Tensor, dims: Mapping[int, DynamicDim]) -> Tensor:
    """An example of at least 2 in every dynamic dimension: torch.export takes a size of 1 for a constant."""
    size = list(t.shape)
    for at, dim in dims.items():
        size[at] = max(size[at], 2 if dim.max is None else min(2, dim.max))
    return t if size == list(t.shape) else t.new_zeros(size)


def _check_ranks(exported: ExportedProgram, world: Comm) -> None:
    """Raise on all ranks if they have traced different graphs: the first's is what all will run."""
    text = str(exported.graph)
    digest = hashlib.sha256(text.encode())
    for name, value in sorted(exported.constants.items()):
        digest.update(name.encode() + (value.numpy().tobytes() if isinstance(value, Tensor) else b""))
    heard = gather_bytes(digest.digest(), world) if world.size > 1 else [b""]
    other = next((rank for rank, said in enumerate(heard) if said != heard[0]), None)
    if other is None:
        return
    texts = gather_bytes(text.encode(), world)
    mine, theirs = (t.decode().splitlines() for t in (texts[0], texts[other]))
    shown = "\n".join([line for line in unified_diff(mine, theirs, lineterm="", n=0) if line[0] in "+-"][2:8])
    raise BackendError(
        f"ranks 0 and {other} would need different programs, so that one could not serve all: something in "
        "the model's forward depends on the rank as a Python number, or is a tensor that is no buffer\n"
        f"{shown or 'their constants differ: ' + ', '.join(sorted(exported.constants))}"
    )


def load(folder: Path, weights: Mapping[str, Tensor], comm_of: Callable[[str], Comm]) -> Program:
    """``comm_of``: the Comm of a group by the name that ``axes_of`` gave it."""
    said = json.loads((folder / NAMES).read_text())
    exported = _read(folder / GRAPH)
    given = [weights[name] for name in said["weights"]]
    given += [comm_of(axes).rank for axes in said["groups"]]
    fixed = iter(given)
    specs = exported.graph_signature.input_specs
    inputs = len([s for s in specs if s.kind.name == "USER_INPUT"]) - len(given)
    if inputs < 0 or [s.kind.name for s in specs[-inputs:] if inputs] != ["USER_INPUT"] * inputs:
        raise BackendError(f"{folder / GRAPH} does not fit {NAMES} beside it")
    constants = [
        next(fixed) if s.kind.name == "USER_INPUT" else exported.constants[str(s.target)]
        for s in (specs[:-inputs] if inputs else specs)
    ]
    written = [s.kind.name.endswith("MUTATION") for s in exported.graph_signature.output_specs]
    if any(written):
        raise BackendError(f"{folder / GRAPH} returns what it writes to; trace the model with this torch")
    module = exported.graph_module
    _prepare(module.graph)
    module.recompile()
    run = module.forward
    return lambda tensors: list(run(*constants, *tensors))


def _prepare(graph: Graph) -> None:
    """Take out what costs time and changes nothing, and call collectives past the dispatcher."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is torch.ops.aten._assert_async.msg:
            node.target = _assert
        elif getattr(node.target, "namespace", "") == NAMESPACE:
            node.target = fast(node.target, node.args[-1]) or node.target
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _assert(holds: Tensor, message: str) -> None:
    """All that tpcore asserts in a graph is that ids fit a vocabulary."""
    if not holds:
        raise IndexError(message)


def _changes_nothing(node: Node) -> bool:
    """A ``to`` of the dtype that its argument has already."""
    if node.target is not torch.ops.aten.to.dtype or len(node.args) != 2 or node.kwargs:
        return False
    source = node.args[0]
    return isinstance(source, Node) and getattr(source.meta.get("val"), "dtype", None) == node.args[1]


def _read(path: Path) -> ExportedProgram:
    """A graph file that holds a graph and nothing that would run code when it is read."""
    try:
        with zipfile.ZipFile(path) as archive:
            for item in _pickles(archive):
                _check_pickle(archive.read(item), item.filename)
        return torch.export.load(path)
    except BackendError as e:
        raise BackendError(f"{path} {e}") from e.__cause__
    except Exception as e:  # a damaged archive makes torch raise whatever its bytes happen to mean
        raise BackendError(f"{path} is damaged: {type(e).__name__}: {str(e)[:200]}") from e


_PLAIN = (".json", "/archive_format", "/archive_version", "/version", "/byteorder", "/serialization_id")


def _pickles(archive: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    """Files that torch.export would unpickle: all but its own and tensors that are marked as mere bytes."""
    items = [item for item in archive.infolist() if item.file_size]
    raw = set()
    for item in items:
        if item.filename.endswith("_config.json"):  # of weights, and of constants, in the same folder
            for payload in json.loads(archive.read(item))["config"].values():
                if payload["use_pickle"] is False:
                    raw.add(f"{item.filename.rpartition('/')[0]}/{payload['path_name']}")
    for item in items:
        if not item.filename.endswith(_PLAIN) and item.filename not in raw:
            yield item


def _check_pickle(data: bytes, name: str) -> None:
    """torch.export unpickles without restriction: let it have what would pass with."""
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as e:
        raise BackendError(f"holds {name}, which is not made of tensors: it could run code") from e
