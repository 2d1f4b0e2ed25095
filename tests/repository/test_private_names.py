"""Private names of other libraries that the product uses: each is listed here, is there, and takes what it took.

With a release that drops one, this test fails by the name, and not a rank by a stack trace.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from importlib import import_module
from typing import Any

import pytest
from test_house import TREES

BATCHING = "transformers.generation.continuous_batching"
SERVING = "transformers.cli.serving"
NAMES: dict[str, dict[str, str]] = {
    "transformers": {
        f"{SERVING}.utils:_StreamError": "(msg: str)",
        f"{SERVING}.utils:BaseHandler._validate_request": "(self, body)",
        f"{SERVING}.utils:BaseHandler._build_generation_config": "(self, body, model_generation_config",
        f"{SERVING}.utils:BaseHandler._resolve_model": "(self, body",
        f"{SERVING}.completion:CompletionHandler._streaming": "(self, request_id, model, processor, model",
        f"{SERVING}.chat_completion:ChatCompletionHandler._streaming": "(self, request_id, model, processor, model",
        f"{SERVING}.utils:CBStreamer": "_parser _request_id _queue _cb",
        f"{SERVING}.chat_completion:ChatCompletionHandler._build_completion": "(self, request_id, content, model_id",
        f"{SERVING}.chat_completion:ChatCompletionHandler._non_streaming": "(self, request_id, model, processor, model",
        f"{SERVING}.chat_completion:ChatCompletionHandler._valid_params_class": "",
        "transformers.utils.chat_parsing:ResponseParser": "_spec",
        f"{BATCHING}.cb_logits_processors:ContinuousBatchingLogitsProcessorList._retrieve_processors_kwargs": "(self)",
        f"{BATCHING}.continuous_api:ContinuousBatchingManager._create_batch_processor": "(self)",
        f"{BATCHING}.continuous_api:ContinuousBatchingManager": "_wake_up_loop _original_attn_impl _device_mesh "
        "_generation_thread",
        "transformers:GenerationMixin._has_unfinished_sequences": "(self, this_peer_finished, synced_gpus, device)",
        "transformers:PreTrainedConfig": "_attn_implementation _experts_implementation",
        "transformers:GenerationMixin._get_static_cache_init_shape": "(self)",
        "transformers:PreTrainedModel._init_weights": "(self, module)",
        "transformers:PreTrainedModel._from_config": "(config, **kwargs)",
        "transformers:PreTrainedModel._keys_to_ignore_on_save": "",
        "transformers:PreTrainedModel._load_pretrained_model": "(model, state_dict, checkpoint_files, load_config",
        "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys": "(self, loading_info",
        "transformers.integrations.moe:_default_apply_gate": "(self, gate_up_out)",
        "transformers:AutoModelForCausalLM._model_mapping": "",
        "transformers:Trainer": "_train_batch_size _move_model_to_device",
    },
    "peft": {
        "peft:LoraConfig._register_custom_module": "(self, mapping)",
        "peft.tuners.tuners_utils:BaseTunerLayer._cast_input_dtype": "(self, x, dtype)",
    },
    "accelerate": {"accelerate:Accelerator": "_models _optimizers _schedulers _custom_objects _is_accelerate_prepared"},
    "torch": {
        "torch:_assert_async": "",
        "torch:_grouped_mm": "",
        "torch:_inductor": "",
        "torch:_ops": "",
        "torch:_weight_int8pack_mm": "",
        "torch.autograd:Variable._execution_engine": "",
        "torch._C:_functorch": "",
        "torch._C:_are_functorch_transforms_active": "",
        "torch._C:_current_autograd_node": "",
        "torch._C:_current_graph_task_id": "",
        "torch._C:_disabled_torch_function_impl": "",
        "torch._C:_distributed_c10d": "",
        "torch._export.utils:_compiling_state_context": "()",
        "torch.autograd.forward_ad:_current_level": "",
        "torch:Tensor._make_wrapper_subclass": "",
        "torch:UntypedStorage._cdata": "",
        "torch.distributed:ProcessGroup._get_backend": "",
        "torch.distributed:ProcessGroup._allgather_base": "",
        "torch.distributed:ProcessGroup._reduce_scatter_base": "",
        "torch.distributed.distributed_c10d:_get_default_store": "()",
        "torch.nn:Module": "_backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks _modules _parameters "
        "_non_persistent_buffers_set",
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_": "(parameters, max_norm, total_norm",
        "torch.nn.utils.clip_grad:_get_total_norm": "(tensors, norm_type",
        "torch.utils:_pytree": "",
        "torch.utils._python_dispatch:TorchDispatchMode": "",
        "torch.utils._pytree:tree_map": "",
        "torch._ops:OpOverload": "_overloadname _overloadpacket _schema",
        "torch.ops.aten:_assert_tensor_metadata": "",
        "torch.ops.aten:_log_softmax": "",
        "torch.ops.aten:_log_softmax_backward_data": "",
        "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu": "",
        "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu_backward": "",
        "torch.ops.aten:_softmax": "",
        "torch.ops.aten:_softmax_backward_data": "",
        "torch.ops.aten:_unsafe_view": "",
    },
}
OTHERS = {
    "torch_xla": "_XLAC _check_tensor_need_materialization _get_stablehlo _get_xla_tensors_text _set_all_reduce_token "
    "_xla_counter_value _xla_get_default_device _xla_get_default_device_ordinal _xla_get_tensor_id "
    "_xla_set_default_device _xla_user_computation _xla_wait_device_ops _set_thread_isolation_mode",
    "python": "_exit _xoptions _current_frames _getframe _DummyThread _run_exitfuncs _asdict _fields",
    "pytest": "_tw",
    "experts of transformers' models, asked for with hasattr": "_apply_gate",
}
"""Of what is not installed here, or has them in its documentation."""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _listed() -> set[str]:
    names = {n for words in OTHERS.values() for n in words.split()}
    for table in NAMES.values():
        for path, more in table.items():
            names |= {*path.replace(":", ".").split("."), *more.split()}
    return names


def _own() -> set[str]:
    """What the product defines or stores itself."""
    own = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return own


def test_each_private_name_of_another_library_is_listed() -> None:
    found, own = defaultdict(set), _own()
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            for name in filter(_private, names):
                if name not in own:
                    found[name].add(module)
    assert {name: modules for name, modules in found.items() if name not in _listed()} == {}


@pytest.mark.parametrize(("path", "text"), [item for table in NAMES.values() for item in table.items()])
def test_it_is_there_and_takes_what_it_took(path: str, text: str) -> None:
    """``text``: how its signature begins, without annotations and defaults; or what a class stores."""
    module, _, name = path.partition(":")
    value: Any = import_module(module) if not module.startswith("torch.ops") else _torch_ops()
    for part in name.split("."):
        value = getattr(value, part)
    if text.startswith("("):
        signature = inspect.signature(value)
        plain = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
        shown = ", ".join(map(str, plain))
        assert f"({shown})".startswith(text.split(":")[0].rstrip(")") if ":" in text else text), signature
    elif text:
        sources = "".join(inspect.getsource(kind) for kind in value.__mro__ if kind.__module__ != "builtins")
        assert [n for n in text.split() if n not in sources and not hasattr(value, n)] == []


def _torch_ops() -> Any:
    import torch

    return torch.ops.aten
