"""``torch.compile(backend="neuron")`` on the stand-in: graphs that Neuron's compiler would be given, run one operator
after the other."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch.fx import GraphModule, Interpreter

from tpcore.backend.interface import ProgramInfo
from tpcore.comm.signature import call_site
from tpcore.private import OpOverload

from .device import NAME, install
from .private import aot_autograd, register_backend, tree_map

_KNOWN = ("aten", "prims", "_c10d_functional")


class _Interpreter(Interpreter):
    """Runs a graph on the memory of the device's tensors, as narrow as the hardware."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        args, kwargs = tree_map(lambda x: torch.device("cpu") if isinstance(x, torch.device) else x, (args, kwargs))
        return install().on_memory(target, args, kwargs)


def _compiled(graph: GraphModule, inputs: Sequence[Any]) -> Any:
    device = install()
    sizes = sorted({str(x) for x in inputs if isinstance(x, torch.SymInt)})
    device.limits.refuse("dynamic", bool(sizes), ", ".join(sizes))
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    operators = [target for target in called if isinstance(target, OpOverload)]
    strange = sorted({str(op) for op in operators if op.namespace not in _KNOWN})
    device.limits.refuse("graph_operators", bool(strange), ", ".join(strange))
    info, run = _described(graph, operators, inputs), _Interpreter(graph)

    def call(*values: Any) -> Any:
        device.programs[info] += 1
        return run.run(*values)

    return make_boxed_func(call)


def _described(graph: GraphModule, operators: Sequence[Any], inputs: Sequence[Any]) -> ProgramInfo:
    kinds = Counter(op.overloadpacket.__name__ for op in operators if op.namespace == "_c10d_functional")
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    text = "\n".join([graph.code, *(f"{x.dtype} {list(x.shape)}" for x in tensors)])
    return ProgramInfo(
        hashlib.sha256(text.encode()).hexdigest()[:12],
        _site(),
        0,
        len(operators),
        ", ".join(f"{n} {kind}" for kind, n in kinds.items() if kind != "wait_tensor"),
        sum(x.nbytes for x in tensors),
    )


def _site() -> str:
    """The line of the program that asks for a graph. A backward one is made in a thread of torch's: then it is the line
    of the forward graph."""
    if threading.current_thread() is threading.main_thread():
        code, line = call_site()
        install().site = f"{code.co_filename}:{line} in {code.co_name}"
    return install().site


def register() -> None:
    """Make the backend ``neuron`` of torch.compile."""
    register_backend(aot_autograd(fw_compiler=_compiled), NAME)
