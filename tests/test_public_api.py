"""The public names, frozen: whoever adds or removes one says so here and in the changelog."""

from __future__ import annotations

import importlib

import pytest

import tpcore

LAYERS = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]
REGIONS = [
    "copy_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]

PUBLIC = {
    "tpcore": [
        *LAYERS,
        "ColumnParallelConv1D",
        "ParallelQKV",
        "RowParallelConv1D",
        "share_input",
        "Backend",
        "BackendError",
        "Block",
        "Capabilities",
        "CheckpointError",
        "CollectiveMismatchError",
        "CollectiveTimeoutError",
        "Comm",
        "Group",
        "LayerNorm",
        "Layout",
        "Mesh",
        "ParallelContext",
        "ParallelModule",
        "PeerLostError",
        "PipelineModel",
        "PipelinedLayers",
        "RMSNorm",
        "ShardSpec",
        "Transport",
        "Zero1",
        "backends",
        "check_replicas",
        "checkpoint",
        "clip_grad_norm",
        "current",
        "divide",
        "dtensor_state_dict",
        "explain",
        "full_state_dict",
        "hookimpl",
        "init",
        "is_initialized",
        "keep_freed_memory",
        "launch",
        "lazy",
        "move_model_to_device",
        "optim",
        "optimizer_step",
        "parallel_cross_entropy",
        "parallel_layers",
        "parallel_state",
        "parallelize",
        "random",
        "reduce_gradients",
        "shard_specs",
        "shutdown",
        "trace",
        "trace_causal_lm",
        "use",
    ],
    "tpcore.ops": [
        "all_gather",
        "all_to_all",
        "copy",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
        "shift",
        "sum_dtype",
    ],
    "tpcore.optim": ["Zero1", "lazy"],
    "tpcore.random": ["draw", "get_state", "manual_seed", "mixed", "seeded", "set_state", "sharded"],
    "tpcore.explaining": ["Collective", "Explanation", "Parameter", "Program", "StageCost", "explain"],
    "tpcore.checkpoint": ["load", "save", "wait"],
    "tpcore_neuron": ["NativeBackend", "NeuronBackend"],
    "tpcore_neuron.testing": ["Collective", "Program", "lower", "programs", "run_replicas"],
    "tpcore.trace": [
        "TensorParallelModel",
        "generate",
        "parallel_model_load",
        "parallel_model_save",
        "parallel_model_trace",
    ],
    "tpcore.testing": ["ThreadBackend", "run_ranks"],
    "tpcore.parallel_state": [
        "destroy_model_parallel",
        "get_context_model_parallel_group",
        "get_context_model_parallel_rank",
        "get_context_model_parallel_replica_groups",
        "get_context_model_parallel_size",
        "get_data_parallel_group",
        "get_data_parallel_rank",
        "get_data_parallel_replica_groups",
        "get_data_parallel_size",
        "get_data_parallel_src_rank",
        "get_data_parallel_world_size",
        "get_pipeline_model_parallel_group",
        "get_pipeline_model_parallel_rank",
        "get_pipeline_model_parallel_replica_groups",
        "get_pipeline_model_parallel_size",
        "get_tensor_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_replica_groups",
        "get_tensor_model_parallel_size",
        "get_tensor_model_parallel_src_rank",
        "get_tensor_model_parallel_world_size",
        "get_tensor_parallel_size",
        "get_world_group",
        "initialize_model_parallel",
        "is_global_rank_zero",
        "model_parallel_is_initialized",
        "rmsg",
    ],
    "tpcore.parallel_layers": [
        *LAYERS,
        *REGIONS,
        "checkpointing",
        "clip_grad_norm",
        "copy_tensor_model_parallel_attributes",
        "get_xla_rng_tracker",
        "grads",
        "initialize_model_parallel",
        "layer_norm",
        "layers",
        "load",
        "loss_functions",
        "mappings",
        "model_parallel_xla_manual_seed",
        "move_model_to_device",
        "parallel_cross_entropy",
        "parallel_state",
        "random",
        "save",
        "split_tensor_along_last_dim",
        "utils",
    ],
    "tpcore.parallel_layers.checkpointing": ["load", "save"],
    "tpcore.parallel_layers.grads": ["clip_grad_norm"],
    "tpcore.parallel_layers.layer_norm": ["LayerNorm"],
    "tpcore.parallel_layers.layers": LAYERS,
    "tpcore.parallel_layers.loss_functions": ["parallel_cross_entropy"],
    "tpcore.parallel_layers.mappings": [
        *REGIONS,
        "gather_from_sequence_parallel_region",
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
    ],
    "tpcore.parallel_layers.random": [
        "XLARNGStatesTracker",
        "get_xla_rng_tracker",
        "model_parallel_xla_manual_seed",
    ],
    "tpcore.parallel_layers.utils": [
        "copy_tensor_model_parallel_attributes",
        "divide",
        "ensure_divisibility",
        "move_model_to_device",
        "split_tensor_along_dim",
        "split_tensor_along_last_dim",
    ],
}


def _published(name: str) -> set[str]:
    """``__all__``, or where a module has none what it defines without an underscore."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return set(module.__all__)
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", None) == name}
    return {n for n in own if not n.startswith("_")}


@pytest.mark.parametrize("name", PUBLIC)
def test_names_are_frozen(name: str) -> None:
    assert _published(name) == set(PUBLIC[name])


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name: str) -> None:
    module = importlib.import_module(name)
    for public in PUBLIC[name]:
        assert getattr(module, public) is not None
    assert len(PUBLIC[name]) == len(set(PUBLIC[name]))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tpcore' has no attribute 'tracing'"):
        tpcore.tracing  # noqa: B018  the access is the test
