"""The native Neuron backend over gloo, by its two parameters, in real processes."""

from __future__ import annotations

import pytest
import torch
import tpcore_neuron
from tpcore_neuron import NativeBackend, platform

import tpcore
from tpcore.runtime.context import ParallelContext
from tpcore.testing import matrix

pytestmark = pytest.mark.xdist_group("native")
SOME = [c for layer in matrix.AXES for dtype in ("fp32", "bf16") for c in matrix.cases(layer, dtype)[::29]]


def on_gloo() -> list[str]:
    ctx = tpcore.init(backend=NativeBackend("cpu", "gloo"), tp=2)
    found = matrix.run(ctx, SOME)
    for axis in ("tp", "dp"):
        found += [f"{axis}: {name}" for name, got, want in primitives(ctx, axis) if not torch.equal(got, want)]
    tpcore.shutdown()
    return found


def primitives(ctx: ParallelContext, axis: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    comm = ctx.comm(axis)
    members = comm.group.members(ctx.rank)
    every = [torch.arange(64.0).view(4, 4, 4) * (r + 1) for r in range(4)]
    x, mine, me = every[ctx.rank], [every[r] for r in members], members.index(ctx.rank)
    total = mine[0] + mine[1]
    out = [
        ("sum", comm.all_reduce(x), total),
        ("max", comm.all_reduce(x, "max"), torch.maximum(*mine)),
        ("any", comm.all_reduce(x == x.max()), mine[0] == mine[0].max()),
        ("broadcast", comm.broadcast(x, 1), mine[1]),
        ("nothing", comm.all_gather(x[:0], 1), torch.empty(0, 8, 4)),
        ("group", ctx.comm_for(comm.process_group).all_reduce(x), total),
        ("bits", comm.all_gather(x > 3, 0), torch.cat([m > 3 for m in mine])),
        ("input", x, torch.arange(64.0).view(4, 4, 4) * (ctx.rank + 1)),
    ]
    for dim in range(3):
        out.append(
            (
                f"gather {dim}",
                comm.all_gather(x.transpose(0, 2), dim),
                torch.cat([m.transpose(0, 2) for m in mine], dim),
            )
        )
        out.append((f"scatter {dim}", comm.reduce_scatter(x, dim), total.chunk(2, dim)[me]))
    return out


@pytest.mark.slow
def test_layers_and_primitives():
    assert tpcore.launch(on_gloo, 4) == [[]] * 4


@pytest.mark.parametrize(
    ("version", "has_xla", "backend"),
    [("2.13.1", False, "NativeBackend"), ("2.9.0", False, "NeuronBackend"), ("2.13.1", True, "NeuronBackend")],
)
def test_the_installed_packages_choose_the_backend(monkeypatch, caplog, version, has_xla, backend):
    monkeypatch.setattr(platform, "installed", lambda name: version)
    monkeypatch.setattr(platform, "find_spec", lambda name: object() if has_xla else None)
    with caplog.at_level("INFO", "tpcore"):
        assert tpcore_neuron.tpcore_backend().__name__ == backend
    assert ("native backend" in caplog.text) == (backend == "NativeBackend")


def test_without_a_core_the_native_backend_is_unavailable(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "_DEVICES", str(tmp_path))
    assert "no NeuronCore is visible" in NativeBackend.unavailable()
