"""Public names: what ``__all__`` says is there, and what a module without one has, frozen, by each of its paths."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re

import pytest
from test_house import TREES

import tpcore
import tpcore_nxd

OTHERS = {
    name: text.split()
    for name, text in {
        "tpcore.comm.mappings": """
            all_gather all_to_all averaged collect copy gather largest reduce reduce_scatter scatter shift sum_dtype
            transformed
        """,
        "tpcore.runtime.random": "draw get_state manual_seed mixed seeded set_state sharded",
        "tpcore_nxd.parallel_layers.grads": """
            allreduce_sequence_parallel_gradients bucket_allreduce_gradients clip_grad_norm clip_grads_with_norm
            get_grad_norm
        """,
        "tpcore_nxd.parallel_layers.layer_norm": "LayerNorm",
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
        "tpcore_nxd.modules.qkv_linear": "GQAQKVColumnParallelLinear",
        "tpcore_nxd.modules.rms_norm": "RMSNorm",
        "tpcore_nxd.optimizer": "NeuronEPZero1Optimizer NeuronZero1Optimizer ZeroRedundancyOptimizer",
        "tpcore_nxd.optimizer.zero_redundancy_optimizer": "NeuronZero1Optimizer",
        "tpcore_nxd.pipeline.model": "NxDPPModel",
        "tpcore_nxd.trainer.checkpoint": "finalize_checkpoint has_checkpoint load_checkpoint save_checkpoint",
        "tpcore_nxd.trainer.model": """
            NxDModel NxDOptimizer initialize_parallel_model initialize_parallel_optimizer neuronx_distributed_config
        """,
        "tpcore_nxd.trainer.optimizer": "NxDOptimizer initialize_parallel_optimizer",
        "tpcore_nxd.trainer.trainer": """
            initialize_parallel_model initialize_parallel_optimizer neuronx_distributed_config
        """,
        "tpcore_nxd.utils.adamw_fp32_optim_params": "AdamW_FP32OptimParams",
        "tpcore_nxd.utils.batch_utils": "get_batch_on_this_context_parallel_rank",
        "tpcore_nxd.utils.logger": "get_logger",
        "tpcore_nxd.utils.model_utils": "move_model_to_device",
        "tpcore_nxd.operators.argmax": "argmax",
        "tpcore_nxd.operators.topk": "topk whole_of",
    }.items()
}
"""Of modules without ``__all__``, and of other paths of modules, which may have more."""
TRL = importlib.util.find_spec("trl")  # 280 MB, not among the pinned packages
VLLM = importlib.util.find_spec("vllm")  # nor is this, which brings CUDA's torch
DECLARED = [
    module
    for module, tree in TREES.items()
    if any(isinstance(node, ast.Name) and node.id == "__all__" for node in ast.walk(tree))
    and (TRL or not module.endswith((".trl", ".sft")))
    and (VLLM or not module.endswith(".vllm"))
]


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_is_there_once(name: str) -> None:
    module = importlib.import_module(name)
    for public in module.__all__:
        if TRL or not public.startswith("NeuronSFT"):
            assert getattr(module, public) is not None
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("name", OTHERS)
def test_names_are_frozen_and_there(name: str) -> None:
    module = importlib.import_module(name)
    if module.__name__ == name:
        own = {n for n, v in vars(module).items() if getattr(v, "__module__", None) == name}
        assert {n for n in own if not n.startswith("_")} == set(OTHERS[name])
    assert all(hasattr(module, public) for public in OTHERS[name])


def test_the_trainer_answers_to_the_name_of_the_package() -> None:
    for name in filter(str.islower, tpcore_nxd.trainer.__all__):
        assert getattr(tpcore_nxd, name) is getattr(tpcore_nxd.trainer, name)
    for package in ("kernels", "modules", "optimizer", "overrides", "pipeline", "utils"):
        assert getattr(tpcore_nxd, package) is importlib.import_module(f"tpcore_nxd.{package}")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tpcore' has no attribute 'tracing'"):
        tpcore.tracing  # noqa: B018  the access is the test


def test_a_list_of_arguments_names_those_of_the_signature() -> None:
    """The pages of the reference are made of it: Args, Returns and Raises, and no other heading. A function's list has
    all of them; a class may leave some to another's."""
    wrong, lists = [], 0
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
            headings = re.findall(r"^(\w+):\n(?: {4}.*\n?|\n)+", f"{text}\n", re.MULTILINE)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not text or not headings:
                continue
            made = node if isinstance(node, ast.FunctionDef) else next(n for n in node.body if _name(n) == "__init__")
            given = {"self", *(a.arg for a in ast.walk(made.args) if isinstance(a, ast.arg))}
            listed = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
            named = {"self", *re.findall(r"^    (\w+): \S", listed, re.MULTILINE)}
            lists += 1
            unlisted = given - named if made is node else set()
            if set(headings) - {"Args", "Returns", "Raises"} or named - given or unlisted:
                wrong.append(f"{module}.{node.name}: {headings} {sorted(named ^ given)}")
    assert wrong == []
    assert lists > 9


def _name(node: ast.stmt) -> str:
    return getattr(node, "name", "")
