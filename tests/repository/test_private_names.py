"""Private names of other libraries that the product uses: each is listed here, is read in one module, is there, and
takes what it took.

With a release that drops one, this test fails by the name, and not a rank by a stack trace.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest
from helpers.xla_names import XLAC
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
        "transformers:PreTrainedModel": "_init_weights _tp_plan _weight_conversions",
        "transformers:PreTrainedModel._load_pretrained_model": "(model, state_dict, checkpoint_files, load_config",
        "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys": "(self, loading_info",
        "transformers.integrations.moe:_default_apply_gate": "(self, gate_up_out)",
    },
    "peft": {
        "peft:LoraConfig._register_custom_module": "(self, mapping)",
        "peft.tuners.tuners_utils:BaseTunerLayer._cast_input_dtype": "(self, x, dtype)",
    },
    "accelerate": {"accelerate:Accelerator": "_is_accelerate_prepared"},
    "torch": {
        "torch:_assert_async": "",
        "torch:_dynamo.register_backend": "(compiler_fn, name",
        "torch:_guards.TracingContext.try_get": "()",
        "torch:_inductor": "",
        "torch:_weight_int8pack_mm": "",
        "torch.autograd:Variable._execution_engine": "",
        "torch._C:_functorch": "",
        "torch._C:DisableTorchFunctionSubclass": "",
        "torch._C:_are_functorch_transforms_active": "",
        "torch._C:_current_autograd_node": "",
        "torch._C:_get_dispatch_mode": "",
        "torch._C:_TorchDispatchModeKey": "",
        "torch._C:_current_graph_task_id": "",
        "torch._C:_disabled_torch_function_impl": "",
        "torch._C:_distributed_c10d": "",
        "torch._C._distributed_c10d:_set_thread_isolation_mode": "",
        "torch._C:_set_conj": "",
        "torch._C:_set_neg": "",
        "torch._dynamo.backends.common:aot_autograd": "(**kwargs)",
        "torch._export.utils:_compiling_state_context": "()",
        "torch._ops:OpOverload": "_schema",
        "torch._subclasses.fake_tensor:FakeTensor": "",
        "torch._ops:HigherOrderOperator": "",
        "torch.autograd:Variable._execution_engine.queue_callback": "",
        "torch.autograd.forward_ad:_current_level": "",
        "torch:Tensor._make_wrapper_subclass": "",
        "torch:Tensor._backward_hooks": "",
        "torch:Tensor._is_zerotensor": "",
        "torch:Tensor._post_accumulate_grad_hooks": "",
        "torch:Tensor._version": "",
        "torch:UntypedStorage._cdata": "",
        "torch.distributed:ProcessGroup._get_backend": "",
        "torch.distributed:ProcessGroup._allgather_base": "",
        "torch.distributed:ProcessGroup._reduce_scatter_base": "",
        "torch.distributed.distributed_c10d:_get_default_store": "()",
        "torch.distributed.distributed_c10d:_resolve_process_group": "",
        "torch.distributed.distributed_c10d:_world": "",
        "torch.distributed.rendezvous:_rendezvous_handlers": "",
        "torch.nn:Module": "_backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks _apply _buffers "
        "_modules _parameters _non_persistent_buffers_set",
        "torch.nn:Module._load_from_state_dict": "(self, state_dict, prefix, local_metadata, strict, missing_keys",
        "torch.nn:Module._save_to_state_dict": "(self, destination, prefix, keep_vars)",
        "torch.nn.utils.clip_grad:_group_tensors_by_device_and_dtype": "(tensorlistlist",
        "torch.nn.utils.stateless:_functional_call": "(module, parameters_and_buffers, args",
        "torch.nn.parallel:DistributedDataParallel": "_ddp_params_and_buffers_to_ignore",
        "torch.optim.lr_scheduler:LRScheduler": "_opt_called",
        "torch.utils._python_dispatch:TorchDispatchMode": "",
        "torch.utils._pytree:tree_leaves": "(tree",
        "torch.utils._pytree:tree_map": "(func, tree",
        "torch.utils.backend_registration:_DummyBackendModule": "",
        "torch.utils.backend_registration:_setup_privateuseone_for_python_backend": "(rename, backend_module",
        "torch.ops.aten:_fused_sdp_choice": "",
        "torch.ops.aten:_index_put_impl_": "",
        "torch.ops.aten:_to_copy": "",
        "torch.ops.aten:_local_scalar_dense": "",
        "torch.ops.aten:_assert_tensor_metadata": "",
        "torch.ops.aten:_log_softmax": "",
        "torch.ops.aten:_log_softmax_backward_data": "",
        "torch.ops.aten:_safe_softmax": "",
        "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu": "",
        "torch.ops.aten:_scaled_dot_product_flash_attention_for_cpu_backward": "",
        "torch.ops.aten:_softmax": "",
        "torch.ops.aten:_softmax_backward_data": "",
        "torch.ops.aten:_unsafe_view": "",
    },
}
OPTIONAL = "_apply_gate _dynamo_marked_constant _grouped_mm _has_new_requests _is_expert_parallel _mesh"
"""Of some releases alone, asked for with hasattr, or marks that are set."""
INHERITED = {
    "tpcore.layers.module": "_load_from_state_dict _save_to_state_dict",
    "tpcore_hf.accelerate": "_models _optimizers _schedulers _custom_objects",
    "tpcore_hf.adapters.lora": "_cast_input_dtype _get_in_out_features",
    "tpcore_hf.trainer": "_load_best_model _load_from_checkpoint _load_optimizer_and_scheduler _load_rng_state "
    "_move_model_to_device _save _save_optimizer_and_scheduler _train_batch_size",
    "tpcore_neuron.stand_in.group": "_allgather_base _reduce_scatter_base _register_backend _set_default_backend",
    "tpcore_serve.batches": "_cb _parser _queue _request_id",
    "tpcore_serve.handlers": "_build_chunk_sse _build_completion _build_generation_config _non_streaming "
    "_resolve_model _streaming _valid_params_class _validate_request",
}
"""What subclasses of another library's classes override, or read of themselves."""
ANYWHERE = {
    "python": "_exit _xoptions _current_frames _getframe _DummyThread _run_exitfuncs _asdict _fields",
    "pytest": "_tw",
    "torch.ops": "_c10d_functional",
    "what torch's modules, tensors, state dicts keep for subclasses": "_apply _buffers _metadata _modules _parameters "
    "_version",
    "parts of names": "_bias _copies _extra_state _index _io _pp_rank_ _proj _projection_name _scale _sym_ _tool_call_",
}
"""What several modules read: it is documented, or for subclasses. So are operators of torch.ops.aten."""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _own() -> set[str]:
    """What the product defines, or stores on itself."""
    own = set()
    for node in (node for tree in TREES.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else set()
    return own


def _named(node: ast.AST) -> list[str]:
    """The names that a node reads, strings with which attributes are asked for included."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    word = isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
    return [node.value] if word and not node.value.startswith("_tpcore_") else []  # type: ignore[attr-defined]


def _words(table: dict[str, str]) -> set[str]:
    return {n for path, more in table.items() for n in re.split(r"[.: ]", f"{path} {more}")}


def test_each_private_name_of_another_library_is_read_in_one_module() -> None:
    own, found = _own(), defaultdict(set)
    listed = {*OPTIONAL.split()}.union(*map(_words, NAMES.values()))
    anywhere = {n for words in ANYWHERE.values() for n in words.split()}
    anywhere |= {path.partition(":")[2] for path in NAMES["torch"] if path.startswith("torch.ops.aten")}
    for module, tree in TREES.items():
        allowed = anywhere | set(INHERITED.get(module, "").split())
        allowed |= {"_XLAC", *XLAC} if module.startswith("tpcore_neuron.") else set()
        for node in ast.walk(tree):
            for name in filter(_private, _named(node)):
                itself = getattr(getattr(node, "value", None), "id", "") in ("self", "cls")
                if name not in allowed and (name not in own or (name in listed and not itself)):
                    found[name].add(module)
    assert {name: modules for name, modules in found.items() if name not in listed or len(modules) > 1} == {}


def _bases(module: str) -> Iterator[tuple[ast.ClassDef, list[type]]]:
    """The classes of a module, those inside of functions too, and what other libraries' classes they are made of."""
    names: dict[str, Any] = {}
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.ClassDef) and node.bases:
            names = names or _names(module)
            try:
                bases = [eval(ast.unparse(base), names) for base in node.bases]
            except NameError:
                continue
            kinds = {kind for base in bases for kind in getattr(base, "__mro__", ())}
            yield node, [k for k in kinds if not k.__module__.startswith(("tpcore", "builtins", "abc", "typing"))]


def _names(module: str) -> dict[str, Any]:
    names = dict(vars(import_module(module)))
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            with suppress(ImportError):
                exec(compile(ast.Module([node], []), module, "exec"), names)
    return names


@pytest.mark.slow
def test_what_subclasses_override_or_read_is_listed_and_in_their_bases() -> None:
    overridden, inherited = defaultdict(set), {}
    for module in TREES:
        try:
            classes = list(_bases(module))
        except ImportError:  # of what is not installed here
            continue
        for node, bases in classes:
            inner = {n for part in node.body for n in _defined(part) if _private(n)}
            overridden[module] |= {n for n in inner if any(n in vars(base) for base in bases)}
        if module in INHERITED:
            inherited[module] = " ".join(map(_source, {b for _, bs in classes for b in bs}))
    anywhere = {n for words in ANYWHERE.values() for n in words.split()}
    unlisted = {m: names - anywhere - set(INHERITED.get(m, "").split()) for m, names in overridden.items()}
    assert {m: names for m, names in unlisted.items() if names} == {}
    for module, source in inherited.items():
        assert [w for w in INHERITED[module].split() if not re.search(rf"\b{w}\b", source)] == []


def _source(base: type) -> str:
    try:
        return inspect.getsource(base)
    except (OSError, TypeError):  # of C++, which has names alone
        return " ".join(vars(base))


def _defined(part: ast.stmt) -> list[str]:
    """By a statement of a class's body."""
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
        return [part.name]
    targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


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
        sources = "".join(_source(kind) for kind in value.__mro__ if kind.__module__ != "builtins")
        assert [n for n in text.split() if n not in sources and not hasattr(value, n)] == []


def _torch_ops() -> Any:
    import torch

    return torch.ops.aten
