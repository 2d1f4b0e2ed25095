"""The public names, frozen: whoever adds or removes one says so here and in the changelog."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

import tpcore
import tpcore_nxd

PUBLIC = {
    name: text.split()
    for name, text in {
        "tpcore": """
            BackendError Block CheckpointError CollectiveMismatchError CollectiveTimeoutError ColumnParallelLinear
            LayerNorm Mesh ParallelContext ParallelEmbedding ParallelModule ParallelQKV PeerLostError PipelineModel
            PipelinedLayers RMSNorm RowParallelLinear ShardSpec Zero1 checkpoint clip_grad_norm current explain init
            init_weights is_initialized launch lazy optimizer_step overlap_grad_reduce parallel_cross_entropy
            parallelize plan random reduce_gradients shard_sequence shutdown trace use
        """,
        "tpcore.comm": "Comm Transport",
        "tpcore_explain": "check_replicas",
        "tpcore.layers": """
            ColumnParallelLinear ParallelEmbedding RowParallelLinear ColumnParallelConv1D ContextParallelAttention
            LayerNorm ParallelQKV RMSNorm RowParallelConv1D gather_logits move_model_to_device parallel_cross_entropy
            parallel_entropy parallel_kl_div parallel_log_softmax parallel_logsumexp shard_specs share_input
        """,
        "tpcore.layout": "Block Group Layout Mesh ShardSpec divide",
        "tpcore_hf": "ExpertLoad full_state_dict lazy parallelize shard_sequence trace_causal_lm",
        "tpcore.runtime": "keep_freed_memory",
        "tpcore.comm.mappings": """
            all_gather all_to_all averaged collect copy gather reduce reduce_scatter scatter shift sum_dtype transformed
        """,
        "tpcore.runtime.random": "draw get_state manual_seed mixed seeded set_state sharded",
        "tpcore_explain.explain": "Collective Explanation Parameter Program ShardedModel StageCost explain",
        "tpcore.checkpoint": "dtensor_state_dict latest load save wait",
        "tpcore_hf.accelerate": "Accelerator",
        "tpcore_nxd.optimum_neuron": """
            ModelParallelismPlugin NeuronAccelerator NeuronHfArgumentParser NeuronModelForCausalLM NeuronPeftModel
            NeuronPeftModelForCausalLM NeuronSFTConfig NeuronSFTTrainer NeuronTrainer NeuronTrainingArguments
            Parallelizer ParallelizersManager Seq2SeqNeuronTrainer Seq2SeqNeuronTrainingArguments
            TrainingNeuronConfig consolidate_model_parallel_checkpoints_to_unified_checkpoint get_peft_model
            lazy_load_for_parallelism make_optimizer_constructor_lazy send_example_telemetry
        """,
        "tpcore_hf.trainer": "Trainer",
        "tpcore_neuron": "NativeBackend NeuronBackend",
        "tpcore_neuron.testing": "Collective Program lower programs run_replicas",
        "tpcore.trace": """
            TensorParallelModel generate generate_each parallel_model_load parallel_model_save parallel_model_trace
        """,
        "tpcore.testing": "ThreadBackend compare run_ranks",
        "tpcore_nxd.parallel_state": """
            create_pg_with_ranks destroy_model_parallel gather_python_object get_context_model_parallel_group
            get_context_model_parallel_rank get_context_model_parallel_replica_groups
            get_context_model_parallel_size get_context_model_parallel_src_tgt_pairs get_data_parallel_group
            get_data_parallel_rank get_data_parallel_replica_groups get_data_parallel_size
            get_data_parallel_src_rank get_data_parallel_world_size get_expert_data_parallel_group
            get_expert_data_parallel_rank get_expert_data_parallel_replica_groups get_expert_data_parallel_size
            get_expert_model_parallel_group get_expert_model_parallel_rank get_expert_model_parallel_replica_groups
            get_expert_model_parallel_size get_next_rank_group get_pipeline_model_parallel_group
            get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank
            get_pipeline_model_parallel_rank get_pipeline_model_parallel_replica_groups
            get_pipeline_model_parallel_size get_prev_rank_group get_rank_info_str get_tensor_model_parallel_group
            get_tensor_model_parallel_rank get_tensor_model_parallel_replica_groups get_tensor_model_parallel_size
            get_tensor_model_parallel_src_rank get_tensor_model_parallel_world_size get_tensor_parallel_size
            get_world_group get_zero1_sharding_groups initialize_model_parallel is_global_rank_zero
            model_parallel_is_initialized rmsg
        """,
        "tpcore_nxd.parallel_layers": """
            PARALLEL_FUNCTIONS PARALLEL_MODULES ColumnParallelLinear ParallelEmbedding RowParallelLinear
            copy_to_tensor_model_parallel_region
            gather_from_tensor_model_parallel_region reduce_from_tensor_model_parallel_region
            scatter_to_tensor_model_parallel_region checkpointing clip_grad_norm
            copy_tensor_model_parallel_attributes get_xla_rng_tracker grads initialize_model_parallel layer_norm
            layers load loss_functions mappings model_parallel_xla_manual_seed move_model_to_device
            parallel_cross_entropy parallel_state random save split_tensor_along_last_dim utils
        """,
        "tpcore_nxd.parallel_layers.checkpointing": "load save",
        "tpcore_nxd.parallel_layers.grads": """
            allreduce_sequence_parallel_gradients bucket_allreduce_gradients clip_grad_norm clip_grads_with_norm
            get_grad_norm
        """,
        "tpcore_nxd.parallel_layers.layer_norm": "LayerNorm",
        "tpcore_nxd.parallel_layers.layers": """
            ColumnParallelLinear ParallelEmbedding RowParallelLinear BaseParallelLinear
            copy_tensor_model_parallel_attributes create_local_weight param_is_not_tensor_parallel_duplicate
        """,
        "tpcore_nxd.parallel_layers.pad": "get_number_of_extra_heads pad_model",
        "tpcore_nxd.parallel_layers.loss_functions": "from_parallel_logits_to_logprobs parallel_cross_entropy",
        "tpcore_nxd.parallel_layers.mappings": """
            copy_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region
            reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region
            gather_from_sequence_parallel_region gather_from_tensor_model_parallel_region_with_dim
            reduce_scatter_to_sequence_parallel_region reduce_scatter_to_tensor_model_parallel_region_with_dim
            scatter_to_sequence_parallel_region
        """,
        "tpcore_nxd.parallel_layers.random": "XLARNGStatesTracker get_xla_rng_tracker model_parallel_xla_manual_seed",
        "tpcore_nxd.kernels": "nki_flash_attn_func nki_ring_attn_func",
        "tpcore_nxd.kernels.flash_attn": "nki_flash_attn_func",
        "tpcore_nxd.kernels.ring_attention_kernel": "nki_ring_attn_func",
        "tpcore_nxd.overrides": "apply_rotary_pos_emb",
        "tpcore_nxd.overrides.transformer_overrides": "apply_rotary_pos_emb",
        "tpcore_nxd.modules": "GQAQKVColumnParallelLinear RMSNorm",
        "tpcore_nxd.modules.qkv_linear": "GQAQKVColumnParallelLinear",
        "tpcore_nxd.modules.rms_norm": "RMSNorm",
        "tpcore_nxd.optimizer": "NeuronEPZero1Optimizer NeuronZero1Optimizer",
        "tpcore_nxd.optimizer.zero_redundancy_optimizer": "NeuronZero1Optimizer",
        "tpcore_nxd.pipeline": "NxDPPModel",
        "tpcore_nxd.pipeline.model": "NxDPPModel",
        "tpcore_nxd.trainer": """
            finalize_checkpoint has_checkpoint initialize_parallel_model initialize_parallel_optimizer
            load_checkpoint neuronx_distributed_config save_checkpoint NxDModel NxDOptimizer
        """,
        "tpcore_nxd.trainer.checkpoint": "finalize_checkpoint has_checkpoint load_checkpoint save_checkpoint",
        "tpcore_nxd.trainer.model": """
            NxDModel NxDOptimizer initialize_parallel_model initialize_parallel_optimizer neuronx_distributed_config
        """,
        "tpcore_nxd.trainer.optimizer": "NxDOptimizer initialize_parallel_optimizer",
        "tpcore_nxd.trainer.trainer": """
            initialize_parallel_model initialize_parallel_optimizer neuronx_distributed_config
        """,
        "tpcore_nxd.utils": """
            AdamW_FP32OptimParams cpu_mode get_batch_on_this_context_parallel_rank get_device get_logger
            get_rank_info_str mark_step master_print move_model_to_device
        """,
        "tpcore_nxd.utils.adamw_fp32_optim_params": "AdamW_FP32OptimParams",
        "tpcore_nxd.utils.batch_utils": "get_batch_on_this_context_parallel_rank",
        "tpcore_nxd.utils.logger": "get_logger",
        "tpcore_nxd.utils.model_utils": "move_model_to_device",
        "tpcore_nxd.parallel_layers.utils": """
            EmbeddingUtility XLARNGStatesTracker cast_all cast_if_autocast_enabled
            copy_tensor_model_parallel_attributes divide ensure_divisibility
            from_parallel_logits_to_logprobs get_local_world_size get_number_of_extra_heads get_padding_length
            get_xla_rng_tracker is_pjrt_device model_parallel_xla_manual_seed move_all_tensor_to_cpu
            move_model_to_device pad_model parallel_cross_entropy param_is_not_tensor_parallel_duplicate
            requires_init_pg_override split_tensor_along_dim split_tensor_along_last_dim
            split_tensor_along_second_dim
        """,
        "tpcore_nxd.operators.argmax": "argmax",
        "tpcore_nxd.operators.topk": "topk whole_of",
    }.items()
}


def _published(name: str) -> set[str]:
    """``__all__``, or where a module has none what it defines without an underscore."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return set(module.__all__)
    own = {n for n, v in vars(module).items() if getattr(v, "__module__", None) == name}
    return {n for n in own if not n.startswith("_")}


@pytest.mark.parametrize("name", PUBLIC)
def test_names_are_frozen_and_there(name: str) -> None:
    module = importlib.import_module(name)
    assert _published(name) == set(PUBLIC[name]) or module.__name__ != name  # another path of a module that has more
    trl = importlib.util.find_spec("trl")  # 280 MB, not among the pinned packages
    for public in PUBLIC[name]:
        if trl or not public.startswith("NeuronSFT"):
            assert getattr(module, public) is not None
    assert len(PUBLIC[name]) == len(set(PUBLIC[name]))


def test_the_trainer_answers_to_the_name_of_the_package() -> None:
    for name in filter(str.islower, PUBLIC["tpcore_nxd.trainer"]):
        assert getattr(tpcore_nxd, name) is getattr(tpcore_nxd.trainer, name)
    for package in ("kernels", "modules", "optimizer", "overrides", "pipeline", "utils"):
        assert getattr(tpcore_nxd, package) is importlib.import_module(f"tpcore_nxd.{package}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tpcore' has no attribute 'tracing'"):
        tpcore.tracing  # noqa: B018  the access is the test
