"""vLLM's own classes take a sharded model's weights, where its package is installed: no device is needed for that."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import hf
from test_weight_source import assert_same, made

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

base = pytest.importorskip(
    "vllm.distributed.weight_transfer.base", reason="vLLM is not installed, and its wheels need CUDA's torch"
)


class Client:
    """The engine's side of the control plane."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.phases.append("init")

    def start_weight_update(self) -> None:
        self.phases.append("start")

    def update_weights(self, update_info: Any) -> None:
        self.phases.append(f"update {len(update_info['names'])}")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.phases.append("finish")


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}])
def test_four_phases_and_both_iterations(mesh: dict[str, int]) -> None:
    """Its NCCL engine, with the broadcast alone replaced by a list; chunks of ``iter_local`` make the whole."""
    from vllm.distributed.weight_transfer import nccl_engine

    from tpcore_hf.vllm import VllmSource

    class Engine(nccl_engine.NCCLTrainerWeightTransferEngine):  # type: ignore[misc, unused-ignore]
        def _open_trainer_endpoint(self, init_info: Any) -> None:
            self.received: list[Any] = []

        def _broadcast(self, source: Any, meta: Any) -> None:
            pairs = self._checked_iter(source, meta)
            if self.is_sender:
                self.received = list(pairs)
            else:
                assert len(list(pairs)) == len(meta)

    def rank(ctx: tpcore.ParallelContext) -> Any:
        options = {"num_microbatches": 1} if "pp" in mesh else {}
        model = tpcore.parallelize(made(hf.llama), **options)
        source, client = VllmSource(model, dtype=torch.bfloat16), Client()
        info = nccl_engine.NCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=ctx.rank)
        Engine._build_worker_init_payload = classmethod(lambda cls, init_info: {})  # type: ignore[assignment]
        engine = Engine(client=client, source=source, is_sender=info.is_sender, rank=ctx.rank)
        if info.is_sender:
            client.init_weight_transfer_engine({})
            engine._open_trainer_endpoint(info)
        engine.send_weights()
        return client.phases, dict(getattr(engine, "received", [])), source.metadata, dict(source.iter_local())

    results = run_ranks(Mesh(mesh), rank)
    want = {k: t.bfloat16() for k, t in partial(made, hf.llama)().state_dict().items()}
    phases, received, metadata, _ = results[0]
    assert phases == ["init", "start", f"update {len(want)}", "finish"]
    assert [phases for phases, *_ in results[1:]] == [[]] * (len(results) - 1)
    assert_same(received, want)
    assert all(other == metadata for _, _, other, _ in results)
    sharded = 0
    for meta in metadata:
        for number, (*_, local) in enumerate(results):
            whole, at = want[meta.name], Mesh(mesh).coords(number)
            for axis, placement in zip(mesh, meta.placements or (), strict=meta.placements is not None):
                if isinstance(placement, base.Shard):
                    whole = whole.chunk(mesh[axis], placement.dim)[at[axis]]
            assert torch.equal(local[meta.name], whole)
        sharded += meta.placements is not None
    assert (sharded > 0) == ("pp" not in mesh)
