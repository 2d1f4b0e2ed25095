"""Graphs go to JSON and come back to compute the same; what is damaged or unknown is refused."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tpcore.errors import BackendError
from tpcore.trace.graph import from_json, to_json
from tpcore_cpu_gloo.programs import load


class Various(nn.Module):
    """Infinities, slices, dtypes, devices, a constant, several outputs, arithmetic on sizes, inner graphs."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = x.masked_fill(y < 0, -math.inf) + torch.tensor([1.5, 2.5])[0]
        n = x.shape[0]
        z = torch.zeros(n * 2 - n, 3, dtype=torch.float64, device=x.device)
        with torch.autocast("cpu", enabled=False):
            a, b = (x[:, 1:].clone(memory_format=torch.contiguous_format).to(torch.float64) * n).chunk(2, 1)
        torch._assert_async((y == y).all(), "no nan")
        return torch.where(y > 0, x, 0.0).sum(dim=(0, 1), keepdim=True), a + z[:, :1], b, torch.max(y, 1)[1]


def exported(model: nn.Module, *args: Tensor) -> Any:
    rows = torch.export.Dim("rows", min=2, max=9)
    with torch.no_grad():
        return torch.export.export(model, args, dynamic_shapes=({0: rows}, {0: rows}), strict=False)


def test_there_and_back() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    made = exported(Various(), x, y)
    again = from_json(json.loads(json.dumps(to_json(made.graph_module), allow_nan=False)), {})
    constants = [made.constants[s.target] for s in made.graph_signature.input_specs if s.target is not None]
    for rows in (4, 7):
        x, y = torch.randn(rows, 3), torch.randn(rows, 3)
        want = Various()(x, y)
        for got, wanted in zip(again(*constants, x, y), want, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)
    assert "autocast" in json.dumps(to_json(made.graph_module))  # an inner graph was among them


def spoil(change: Callable[[Any], Any], folder: Path) -> None:
    path = folder / "graph.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def node(*wanted: Any) -> Callable[[Any], Any]:
    return lambda said: {**said, "nodes": [said["nodes"][0], list(wanted), *said["nodes"][1:]]}


MARK = "__import__('sys').modules.update(ran=None)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (node("a", "os.system", [["echo"]]), "operator os.system is not in this process"),
        (node("a", "torch.load", ["x"]), "operator torch.load is not in this process"),
        (node("a", "math.__loader__", []), "operator math.__loader__ is not in this process"),
        (node("a", "operator.attrgetter", ["x"]), "operator operator.attrgetter is not in this process"),
        (node("a", "aten::from_file.default", ["/etc/passwd"]), "operator aten::from_file.default is not"),
        (node("a", "load_library::__func__.__call__", ["x.so"]), "operator load_library::.* is not in this"),
        (node("a", "higher_order::__class__", []), "operator higher_order::__class__ is not in this"),
        (node("a", "aten::relu.default", [], {f"a={MARK} or 1, b": 1}), "is damaged: TypeError: .* no name"),
        (node(f"a={MARK}", "input"), None),
        (node(f"a={MARK}", "aten::relu.default", [{"node": "x"}]), None),
        (lambda said: {**said, "graphs": {f"a={MARK}": {"nodes": []}}}, None),
        (node("a", "mine::op.default", []), "operator mine::op.default is not in this process"),
        (node("a", "aten::relu.default", [{"node": "nope"}]), "is damaged: KeyError: 'nope'"),
        (node("a", "aten::relu.default", [{"dtype": "load"}]), "is damaged: TypeError: torch.load is no dtype"),
        (lambda said: [], "is damaged"),
        (lambda said: {**said, "weights": ["nope"]}, "is damaged: KeyError: 'nope'"),
    ],
)
def test_what_is_damaged_or_would_run_code(tmp_path: Path, change: Any, message: str | None) -> None:
    good = {
        "weights": [],
        "groups": [],
        "constants": [],
        "inputs": [None],
        "nodes": [["x", "input"], ["out", "output", [{"node": "x"}]]],
    }
    (tmp_path / "graph.json").write_text(json.dumps(good))
    (tmp_path / "constants.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    assert torch.equal(load(tmp_path, {}, lambda axes: None)([torch.ones(2)])[0], torch.ones(2))  # type: ignore[arg-type,return-value]
    spoil(change, tmp_path)
    if message is None:  # harmless: names in the file are not names in the program that is made of it
        load(tmp_path, {}, lambda axes: None)  # type: ignore[arg-type,return-value]
    else:
        with pytest.raises(BackendError, match=message):
            load(tmp_path, {}, lambda axes: None)  # type: ignore[arg-type,return-value]
    assert "ran" not in sys.modules
