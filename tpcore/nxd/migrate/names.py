"""The counterparts of other libraries' names: the table that ``tpcore migrate`` reads."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@dataclass(frozen=True)
class Counterpart:
    """The name here for a name of another library. ``new`` None: there is none, and ``note`` says what to do.
    ``same_call``: the call stays as it is, so rewriting the import is enough."""

    new: str | None
    note: str = ""
    same_call: bool = True


NXD = "neuronx_distributed"

_P, _L, _S, _M = (
    "tpcore",
    "tpcore.nxd.parallel_layers.layers",
    "tpcore.nxd.parallel_state",
    "tpcore.nxd.parallel_layers.mappings",
)
_CONFIG = "takes no config: pass dtype=, init_method=, sequence_dim= and group= by name; returns y, not (y, bias)"
_FAIRSCALE = "the fifth argument is dtype: pass init_method= by name, and stride= as blocks="

_REGIONS = {
    f"{verb}_model_parallel_region": f"{verb}_tensor_model_parallel_region"
    for verb in ("copy_to", "reduce_from", "scatter_to", "gather_from")
}
_GETTERS = {
    "get_model_parallel_rank": "get_tensor_model_parallel_rank",
    "get_model_parallel_world_size": "get_tensor_model_parallel_size",
    "get_model_parallel_group": "get_tensor_model_parallel_group",
    "get_data_parallel_rank": "get_data_parallel_rank",
    "get_data_parallel_world_size": "get_data_parallel_world_size",
    "get_data_parallel_group": "get_data_parallel_group",
}

FAIRSCALE = {
    "fairscale.nn.model_parallel.layers.ColumnParallelLinear": Counterpart(f"{_P}.ColumnParallelLinear", _FAIRSCALE),
    "fairscale.nn.model_parallel.layers.RowParallelLinear": Counterpart(f"{_P}.RowParallelLinear", _FAIRSCALE),
    "fairscale.nn.model_parallel.layers.ParallelEmbedding": Counterpart(
        f"{_P}.ParallelEmbedding", "cut by rows here: pass shard_across_embedding=True for columns"
    ),
    "fairscale.nn.model_parallel.layers.VocabParallelEmbedding": Counterpart(f"{_P}.ParallelEmbedding"),
    "fairscale.nn.model_parallel.cross_entropy.vocab_parallel_cross_entropy": Counterpart(
        f"{_P}.parallel_cross_entropy"
    ),
    "fairscale.nn.model_parallel.initialize.initialize_model_parallel": Counterpart(
        f"{_S}.initialize_model_parallel", "joins the job by itself; a process group of the script's is used"
    ),
    "fairscale.nn.model_parallel.initialize.model_parallel_is_initialized": Counterpart(
        f"{_S}.model_parallel_is_initialized"
    ),
    **{f"fairscale.nn.model_parallel.initialize.{old}": Counterpart(f"{_S}.{new}") for old, new in _GETTERS.items()},
    **{f"fairscale.nn.model_parallel.mappings.{old}": Counterpart(f"{_M}.{new}") for old, new in _REGIONS.items()},
}

_MEGATRON_LAYERS = "megatron.core.tensor_parallel.layers"
_MEGATRON_PLAIN = {
    f"{_MEGATRON_LAYERS}.ColumnParallelLinear": Counterpart(f"{_P}.ColumnParallelLinear", _CONFIG, False),
    f"{_MEGATRON_LAYERS}.RowParallelLinear": Counterpart(f"{_P}.RowParallelLinear", _CONFIG, False),
    f"{_MEGATRON_LAYERS}.VocabParallelEmbedding": Counterpart(
        f"{_P}.ParallelEmbedding", "takes no config: pass init_method= and dtype=", False
    ),
    "megatron.core.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy": Counterpart(
        f"{_P}.parallel_cross_entropy", "targets and logits have the same leading dims, in any order"
    ),
    **{
        f"megatron.core.tensor_parallel.mappings.{new}": Counterpart(f"{_M}.{new}")
        for new in (
            *_REGIONS.values(),
            "scatter_to_sequence_parallel_region",
            "gather_from_sequence_parallel_region",
            "reduce_scatter_to_sequence_parallel_region",
        )
    },
}
MEGATRON = {
    **_MEGATRON_PLAIN,
    # the package gives the names of its modules too
    **{f"megatron.core.tensor_parallel.{old.rpartition('.')[2]}": to for old, to in _MEGATRON_PLAIN.items()},
    "megatron.core.parallel_state.initialize_model_parallel": Counterpart(
        f"{_S}.initialize_model_parallel", "only tensor and pipeline sizes; the rest of the world is dp"
    ),
}
_STATE = "megatron.core.parallel_state"
_MPU = ("megatron.core.mpu", "megatron.mpu")
"""Other names of Megatron's parallel_state."""

_NEURON = "tpcore.integrations.optimum_neuron"
_PLUGIN, _CONSOLIDATE = (
    "ModelParallelismPlugin",
    "consolidate_model_parallel_checkpoints_to_unified_checkpoint",
)
_SFT = ("NeuronSFTConfig", "NeuronSFTTrainer")
_SEQ2SEQ = ("Seq2SeqNeuronTrainer", "Seq2SeqNeuronTrainingArguments")
OPTIMUM = {
    f"optimum.neuron{inside}.{name}": Counterpart(f"{_NEURON}.{name}")
    for inside, names in {
        "": (
            "NeuronTrainer",
            "NeuronTrainingArguments",
            "NeuronHfArgumentParser",
            "NeuronAccelerator",
            _PLUGIN,
            *_SEQ2SEQ,
            *_SFT,
        ),
        ".hf_argparser": ("NeuronHfArgumentParser",),
        ".training_args": ("NeuronTrainingArguments", _SEQ2SEQ[1]),
        ".trainers": ("NeuronTrainer", _SEQ2SEQ[0], *_SFT),
        ".trainers.sft_config": _SFT[:1],
        ".trainers.sft_trainer": _SFT[1:],
        ".trainers.trainers": ("NeuronTrainer",),
        ".trainers.training_args": ("NeuronTrainingArguments",),
        ".accelerate": ("NeuronAccelerator", _PLUGIN),
        ".accelerate.accelerator": ("NeuronAccelerator",),
        ".accelerate.utils": (_PLUGIN,),
        ".accelerate.utils.dataclasses": (_PLUGIN,),
        ".models.neuron_config": ("TrainingNeuronConfig",),
        ".models.training": ("TrainingNeuronConfig", "NeuronModelForCausalLM"),
        ".peft": ("NeuronPeftModel", "NeuronPeftModelForCausalLM", "get_peft_model"),
        ".models.training.config": ("TrainingNeuronConfig",),
        ".models.training.checkpointing": (_CONSOLIDATE,),
        ".distributed": (
            "ParallelizersManager",
            "lazy_load_for_parallelism",
            "make_optimizer_constructor_lazy",
            _CONSOLIDATE,
        ),
        ".distributed.checkpointing": (_CONSOLIDATE,),
        ".distributed.parallelizers_manager": ("ParallelizersManager",),
        ".distributed.utils": ("lazy_load_for_parallelism", "make_optimizer_constructor_lazy"),
    }.items()
    for name in names
}

XLA = {
    "torch_xla.core.xla_model.optimizer_step": Counterpart(
        "tpcore.optimizer_step(optimizer)",
        "its mean is over dp; before, the sum over dp was divided by all processes, so that gradients were "
        "tp times too small: divide a learning rate that was tuned with SGD by tp",
        False,
    ),
    "torch_xla.core.xla_model.reduce_gradients": Counterpart(
        "tpcore.reduce_gradients(model)",
        "its mean is over dp; before, gradients were tp times too small",
        False,
    ),
    "torch_xla.core.xla_model.all_reduce": Counterpart(
        'tpcore.current().comm("dp").all_reduce(x)', "returns the sum and leaves x as it is", False
    ),
    "torch_xla.core.xla_model.xla_device": Counterpart("tpcore.current().device", "", False),
    "torch_xla.core.xla_model.mark_step": Counterpart(
        "tpcore.nxd.utils.mark_step()", "nothing is needed after tpcore.optimizer_step", False
    ),
    "torch_xla.core.xla_model.master_print": Counterpart("tpcore.nxd.utils.master_print(msg)", "", False),
    "torch_xla.core.xla_model.is_master_ordinal": Counterpart(
        "tpcore.nxd.parallel_state.is_global_rank_zero()", "", False
    ),
    "torch_xla.core.xla_model.save": Counterpart("tpcore.checkpoint.save(state, dir)", "", False),
    "torch_xla.core.xla_model.rendezvous": Counterpart(
        "nothing", "collectives and checkpoints wait where they have to", False
    ),
    "torch_xla.runtime.global_ordinal": Counterpart("tpcore.current().rank", "", False),
    "torch_xla.runtime.world_size": Counterpart("tpcore.current().mesh.size", "", False),
    "torch_xla.distributed.parallel_loader.MpDeviceLoader": Counterpart(
        "the DataLoader itself", "and batch.to(tpcore.current().device)", False
    ),
    "torch_xla.distributed.xla_multiprocessing.spawn": Counterpart(
        "tpcore.launch(fn, nprocs=...)", "or torchrun", False
    ),
}

TRANSFORMERS = {
    "transformers.is_torch_tpu_available": Counterpart("transformers.is_torch_xla_available"),
    "transformers.utils.is_offline_mode": Counterpart("huggingface_hub.is_offline_mode"),
    "transformers.utils.send_example_telemetry": Counterpart(f"{_NEURON}.send_example_telemetry"),
}
"""What scripts of optimum-neuron import of transformers 4, and 5 has not."""

TABLES = {**FAIRSCALE, **MEGATRON, **OPTIMUM, **TRANSFORMERS, **XLA}
FAMILIES = (NXD, "fairscale.nn.model_parallel", "megatron", "optimum.neuron", "torch_xla")

_ABSENT = {
    "parallel_layers.layers.OutputChannelParallelConv2d": "convolutions are not cut",
    "parallel_layers.layers.InputChannelParallelConv2d": "convolutions are not cut",
    "parallel_layers.layers.SPMDRank": "one program serves all ranks: leave it out",
    "parallel_layers.pad": "pass pad=True to the layers whose sizes tp does not divide",
    "parallel_layers.utils.set_tensor_model_parallel_attributes": "derive from tpcore.ParallelModule, and "
    "call shard_parameter",
    "kernels": "torch.nn.functional.scaled_dot_product_attention",
    "modules.moe": "tpcore.parallelize shards the experts of transformers' models: docs/experts.md",
    "modules.moe.expert_mlps": "tpcore.parallelize(model, capacity_factor=), of transformers' experts: docs/experts.md",
    "modules.moe.loss_function": "transformers' loss has it: output_router_logits=True, the coefficient over top_k",
    "modules.lora": "tpcore.integrations.peft.get_peft_model, with peft's LoraConfig",
    "quantization": "tpcore.parallelize(model, quantize=torch.int8)",
    "trace.trace": "the same functions are in tpcore.trace",
    "trace.model_builder": "tpcore.trace.parallel_model_trace",
    "trace.model_builder_v2": "tpcore.trace.parallel_model_trace",
    "overrides": "import what transformers has",
    "lightning": "the loop of the page on training, or the Trainer",
}
"""By the NxD module or name that tpcore lacks, what to do instead. The longest match counts."""


_OF_OPTIMUM = {
    "NeuronORPOTrainer": "tpcore.integrations.trl.DPOTrainer, or a loss of one's own in NeuronTrainer",
    "NeuronGRPOTrainer": "there is none: it needs a server that generates",
}
"""What to do where optimum-neuron has a class that is not here, under any of its modules."""


def counterpart(name: str) -> Counterpart | None:
    """The counterpart of a full name, ``package.module.name``; None for a name of an unknown library."""
    for alias in _MPU:
        if name == alias or name.startswith(f"{alias}."):
            name = f"{_STATE}{name.removeprefix(alias)}"
    if name in TABLES:
        return TABLES[name]
    owner = next((known for known in TABLES if name.startswith(f"{known}.")), None)
    if owner is not None and not owner.startswith("torch_xla"):
        to = TABLES[owner]
        return Counterpart(to.new and f"{to.new}{name.removeprefix(owner)}", "", to.same_call)
    if name == _STATE or name.startswith(f"{_STATE}."):
        new = f"{_S}{name.removeprefix(_STATE)}"
        return Counterpart(new) if _exists(new) else Counterpart(None, "no counterpart")
    if name != NXD and not name.startswith(f"{NXD}."):
        return _module(name) or _gone(name)
    inside = name.removeprefix(NXD).lstrip(".")
    new = f"tpcore.nxd.{inside}" if inside else "tpcore.nxd"
    if _exists(new):
        return Counterpart(new)
    fits = [key for key in _ABSENT if inside == key or inside.startswith(f"{key}.")]
    return Counterpart(None, _ABSENT[max(fits, key=len)] if fits else "no counterpart")


def _module(name: str) -> Counterpart | None:
    """The counterpart of a module with names in the tables: the module here that has all of them as they are,
    or those from which the script has to import them itself."""
    names = {old.removeprefix(f"{name}."): to for old, to in TABLES.items() if old.startswith(f"{name}.")}
    if not names or name.startswith("torch_xla"):
        return None
    names = {old: to for old, to in names.items() if "." not in old} or names
    homes = sorted({str(to.new).rpartition(".")[0] for to in names.values()})
    if homes[1:] or any(to.new != f"{homes[0]}.{old}" or not to.same_call for old, to in names.items()):
        return Counterpart(", ".join(homes), "names differ: import here what the lines below name", False)
    return Counterpart(homes[0])


def _gone(name: str) -> Counterpart | None:
    """'No counterpart' for a name of a listed library; None for torch_xla's and for what is of none."""
    note = next((note for kind, note in _OF_OPTIMUM.items() if kind in name.split(".")), "no counterpart")
    return Counterpart(None, note) if old_library(name) and "torch_xla" not in name else None


def old_library(name: str) -> bool:
    """Whether ``name`` is, or is in, a library whose names are known here, or is one that has gone."""
    return name in TRANSFORMERS or any(name == family or name.startswith(f"{family}.") for family in FAMILIES)


def _exists(name: str) -> bool:
    """Whether ``name`` is a module of tpcore, or an attribute of one."""
    found: object = import_module("tpcore")
    parts = name.split(".")
    for at, part in enumerate(parts[1:], 1):
        inside = ".".join(parts[: at + 1])
        if isinstance(found, ModuleType) and not hasattr(found, part):
            if not hasattr(found, "__path__") or find_spec(inside) is None:
                return False
            found = import_module(inside)
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            return False
    return True
