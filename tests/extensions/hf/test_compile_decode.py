"""torch.compile of the step by which transformers' generate decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from helpers.cuda_on_cpu import StandIn
from helpers.hf import llama
from helpers.rank_pool import RankPool
from torch import Tensor

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.runtime.context import ParallelContext


def _decoded(ctx: ParallelContext) -> None:
    """By ``generate`` as it is on a GPU, where transformers compiles the decode step over a static cache."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = tpcore.parallelize(llama()).eval()
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    how = transformers.CompileConfig(fullgraph=True, backend=compiler, mode="default")
    how._compile_all_devices = True
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(1, 99, (2, 5))
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", compile_config=how, **options), want)
    (graph,) = graphs  # the later steps take the graph of the first
    calls = [str(node.target) for node in graph.graph.nodes if str(node.target).startswith("tpcore.")]
    assert calls == ["tpcore.all_reduce"] * (1 + 2 * model.config.num_hidden_layers) + ["tpcore.all_gather"]


@pytest.mark.slow
@pytest.mark.processes
def test_the_decode_step_is_one_graph_with_its_collectives() -> None:
    with RankPool(2, backend=StandIn) as pool:
        pool.run(Mesh({"tp": 2}), _decoded, timeout=300)
