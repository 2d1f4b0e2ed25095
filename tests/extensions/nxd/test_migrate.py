"""``tpcore migrate`` on scripts of every kind and release: what it finds, and what it leaves as it was."""

from __future__ import annotations

import ast
import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tpcore.cli.app import app
from tpcore_nxd.migrate.names import TABLES, counterpart
from tpcore_nxd.migrate.script import Finding, Script

NXD_01 = """\
import torch_xla.core.xla_model as xm
import neuronx_distributed
from neuronx_distributed.parallel_layers import parallel_state, layers   # kept
from neuronx_distributed.parallel_layers.grads import clip_grad_norm
import neuronx_distributed.parallel_layers.utils as neuronx_dist_utils

torch.distributed.init_process_group("xla")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
model = layers.ColumnParallelLinear(4, 8)
neuronx_distributed.parallel_layers.grads.clip_grad_norm(model.parameters(), 1.0, zero1_optimizer=True)
xm.optimizer_step(
    optimizer, groups=parallel_state.get_data_parallel_group(as_list=True)
)
xm.mark_step()
"""
NXD_18 = """\
import neuronx_distributed as nxd
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    SPMDRank,   # of inference
    ParallelEmbedding as Embedding,
)
from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func, NKIAttnFunc

if True:
    from neuronx_distributed.trainer import initialize_parallel_model, hooks

config = nxd.neuronx_distributed_config(tensor_parallel_size=8, expert_parallel_size=2)
qkv = GQAQKVColumnParallelLinear(64, [64, 8], kv_size_multiplier=4)
words = Embedding(32, 8, sequence_parallel_enabled=True, sequence_dimension=1)
nxd.save_checkpoint("out", tag="step_1", num_kept_ckpts=2)
"""
OPTIMUM_EARLY = """\
from optimum.neuron import NeuronHfArgumentParser as HfArgumentParser, NeuronTrainer, NeuronTrainingArguments
from optimum.neuron import ModelParallelismPlugin, NeuronAccelerator
from optimum.neuron.distributed import ParallelizersManager, lazy_load_for_parallelism
from optimum.neuron.distributed.utils import make_optimizer_constructor_lazy
from optimum.neuron.distributed.checkpointing import (
    consolidate_model_parallel_checkpoints_to_unified_checkpoint as consolidate,
)

parser = HfArgumentParser((NeuronTrainingArguments,))
(arguments,) = parser.parse_args_into_dataclasses()
with lazy_load_for_parallelism(tensor_parallel_size=arguments.tensor_parallel_size):
    model = AutoModelForCausalLM.from_pretrained("model")
ParallelizersManager.parallelizer_for_model(model)
accelerator = NeuronAccelerator(mp_plugin=ModelParallelismPlugin(tensor_parallel_size=2))
optimizer = make_optimizer_constructor_lazy(AdamW)(model.parameters())
NeuronTrainer(model=model, args=arguments).train()
consolidate("out/tensor_parallel_shards", "whole")
"""
OPTIMUM_LATE = """\
import optimum.neuron as on
from optimum.neuron.accelerate import NeuronAccelerator
from optimum.neuron.models.training import NeuronModelForCausalLM, TrainingNeuronConfig
from optimum.neuron.models.training.checkpointing import (
    consolidate_model_parallel_checkpoints_to_unified_checkpoint,
)
from optimum.neuron.trainers import NeuronTrainer
from optimum.neuron import NeuronSFTTrainer

arguments = on.NeuronTrainingArguments("out", zero_1=True)
accelerator = NeuronAccelerator(trn_config=TrainingNeuronConfig(2))
model = NeuronModelForCausalLM.from_pretrained("model", arguments.trn_config)
NeuronTrainer(model=model, args=arguments).train()
consolidate_model_parallel_checkpoints_to_unified_checkpoint("out", "whole")
"""
OTHERS = """\
from optimum.neuron import NeuronTrainer, NeuronTrainingArguments
from optimum.neuron.distributed import lazy_load_for_parallelism
from optimum.neuron.models.inference import Something
import fairscale.nn.model_parallel.initialize as fs_init
from fairscale.nn.model_parallel.layers import ColumnParallelLinear as Column, ParallelEmbedding
from fairscale.nn.model_parallel.mappings import copy_to_model_parallel_region
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear, vocab_parallel_cross_entropy

fs_init.initialize_model_parallel(2)
Column(4, 8, True, False, init)
ParallelEmbedding(8, 4)
row = RowParallelLinear(8, 4, config=config)
parallel_state.get_tensor_model_parallel_rank()
"""


def at(findings: list[Finding], line: int) -> list[tuple[str, str | None, str]]:
    return [(f.old, f.new, f.note) for f in findings if f.line == line]


def test_a_script_of_the_first_release() -> None:
    script = Script(NXD_01)
    _, _, *rest = NXD_01.replace(" neuronx_distributed", " tpcore_nxd").splitlines()
    imports = ["import tpcore_nxd.xla.core.xla_model as xm", "import tpcore_nxd as neuronx_distributed"]
    assert script.rewritten().splitlines() == [*imports, *rest]
    assert at(script.findings, 7) == []  # with tpcore_nxd.xla torch knows "xla"
    assert (script.stays, script.by_hand) == (0, 1)
    clips = at(script.findings, 10)
    assert {new for _, new, _ in clips} == {"tpcore_nxd.parallel_layers.grads.clip_grad_norm"}
    assert any("zero1_optimizer: a ValueError" in note for _, _, note in clips)
    (step,) = at(script.findings, 11)
    assert step[:2] == ("torch_xla.core.xla_model.optimizer_step", "tpcore_nxd.xla.core.xla_model.optimizer_step")
    assert "tp times too small" in step[2]
    assert at(script.findings, 14) == []
    assert at(script.findings, 9) == []  # the same call


def test_a_script_of_the_last_release() -> None:
    script = Script(NXD_18)
    text = script.rewritten()
    ast.parse(text)
    assert text.startswith("import tpcore_nxd as nxd\nfrom tpcore_nxd.modules.qkv_linear import GQAQKV")
    # what has no counterpart stays where it was, and the rest of the line moves
    assert "from tpcore_nxd.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding as Embedding" in text
    assert "from neuronx_distributed.parallel_layers.layers import SPMDRank" in text
    assert "from tpcore_nxd.kernels.flash_attn import nki_flash_attn_func" in text
    assert "from neuronx_distributed.kernels.flash_attn import NKIAttnFunc" in text
    assert "    from tpcore_nxd.trainer import initialize_parallel_model\n" in text
    assert "    from neuronx_distributed.trainer import hooks\n" in text
    gone = {f.old: f.note for f in script.findings if f.new is None}
    assert "leave it out" in gone["from neuronx_distributed.parallel_layers.layers import SPMDRank"]
    assert "scaled_dot_product_attention" in " ".join(gone.values())
    notes = " ".join(f.note for f in script.findings)
    for said in ("kv_size_multiplier: rank r holds", "sequence_dimension: gives [batch, ", "num_kept_ckpts: keeps the"):
        assert said in notes


def test_scripts_for_other_libraries() -> None:
    script = Script(OTHERS)
    lines = script.rewritten().splitlines()
    home = "tpcore_nxd.optimum_neuron"
    assert lines[0] == f"from {home} import NeuronTrainer, NeuronTrainingArguments"
    assert lines[1] == f"from {home} import lazy_load_for_parallelism"
    assert lines[2] == OTHERS.splitlines()[2]
    assert lines[4] == "from tpcore import ColumnParallelLinear as Column, ParallelEmbedding"
    assert lines[5].startswith(
        "from tpcore_nxd.parallel_layers.mappings import copy_to_tensor_model_parallel_region as "
    )
    text = script.rewritten()
    assert "from tpcore import parallel_cross_entropy as vocab_parallel_cross_entropy" in text
    assert "from megatron.core.tensor_parallel import RowParallelLinear" in text  # called otherwise
    notes = {f.old: f.note for f in script.findings}
    assert "takes no config" in notes["megatron.core.tensor_parallel.RowParallelLinear"]
    assert "stride= as blocks=" in notes["fairscale.nn.model_parallel.layers.ColumnParallelLinear"]
    assert "shard_across_embedding=True" in " ".join(notes.values())
    gone = {f.old for f in script.findings if f.new is None}
    assert gone == {"from optimum.neuron.models.inference import Something"}


@pytest.mark.parametrize(
    ("line", "rewritten", "use", "findings"),
    [
        # one module here has all of its names, as they are
        ("from megatron.core import parallel_state as ps", "from tpcore_nxd import parallel_state as ps", "ps.rmsg", 1),
        ("from megatron.core import mpu", "from tpcore_nxd import parallel_state as mpu", "mpu.rmsg()", 1),
        ("import megatron.core.mpu as m", "import tpcore_nxd.parallel_state as m", "m.get_data_parallel_rank()", 1),
        ("import optimum.neuron as on", "import tpcore_nxd.optimum_neuron as on", "on.NeuronTrainer", 1),
        ("from optimum import neuron", "from tpcore_nxd import optimum_neuron as neuron", "neuron", 1),
        # but a name that is not there is listed, and one that is elsewhere
        ("from megatron.core import mpu", "from tpcore_nxd import parallel_state as mpu", "mpu.get_cuda_rng()", 2),
        ("import optimum.neuron as on", "import tpcore_nxd.optimum_neuron as on", "on.trainers.NeuronTrainer", 2),
        # their names are others, or in several modules: the import stays, and each use is listed
        ("import fairscale.nn.model_parallel.initialize as fs", None, "fs.get_model_parallel_rank()", 2),
        ("from fairscale.nn.model_parallel import initialize as fs", None, "fs.initialize_model_parallel(2)", 2),
        ("from megatron.core import tensor_parallel", None, "tensor_parallel.ColumnParallelLinear(4, 8)", 2),
        ("import optimum.neuron", None, "optimum.neuron.NeuronTrainer()", 2),
        ("import megatron.core.parallel_state", None, "megatron.core.parallel_state.rmsg()", 2),
        ("from megatron.training import get_args", None, "get_args()", 2),
        ("import importlib", None, "importlib.import_module('neuronx_distributed.parallel_layers')", 1),
        ("from importlib import import_module", None, "import_module(f'megatron.core.{name}')", 1),
        # of no library that is known here
        ("from optimum import onnxruntime", None, "onnxruntime", 0),
        ("import fairscale", None, "fairscale.nn.FullyShardedDataParallel", 0),
    ],
)
def test_modules(line: str, rewritten: str | None, use: str, findings: int) -> None:
    script = Script(f"{line}\n{use}\n")
    assert script.rewritten() == f"{rewritten or line}\n{use}\n"
    assert len(script.findings) == findings, script.findings
    assert script.stays == (findings > 0 and rewritten is None)
    done = [to for to in (f.new for f in script.findings) if to is None]
    assert bool(done) == ("cuda" in use or "get_args" in use)


@pytest.mark.parametrize(
    ("line", "found", "stays"),
    [
        ("torch.zeros(2, device='xla')", "'xla'", 0),
        ("model.to('xla:1')", "'xla:1'", 0),
        ("device = torch.device(type='xla')", "'xla'", 0),
        ("x.to(f'xla:{rank}')", "'xla:'", 0),
        ("if x.device.type == 'xla': pass", "'xla'", 0),
        ("def f(device='xla'): pass", "'xla'", 0),
        ("if x.is_xla: pass", "x.is_xla", 0),
        ("y = self.x.xla()", "self.x.xla", 0),
        ("parser.add_argument('--device', default='xla')", "'xla'", 0),
        ("dist.init_process_group(backend='xla')", "dist.init_process_group(backend='xla')", 0),
        ("f(); dist.init_process_group('xla')  # tpcore_nxd.xla", "dist.init_process_group('xla')", 0),
        ("import torch_xla; torch_xla.compile(f)", "torch_xla.compile", 0),
        ("from torch_xla.core import xla_model as xm, xla_builder", "from torch_xla.core import xla_builder", 1),
        ("import torch_xla.core.xla_model as xm; xm.unlazy(x)", "torch_xla.core.xla_model.unlazy", 0),
        ("import torch_xla.core.xla_model as xm; f(device='xla:1')", "'xla:1'", 0),
        ("import torch_xla.core.xla_model as xm; xm = 1; f(device='xla')", "'xla'", 0),
        ("import torch_xla.core.xla_model as xm; import mine as xm; f(device='xla')", "'xla'", 0),
        ("import torch_xla.core.xla_model as xm\nclass xm: pass\nf(device='xla')", "'xla'", 0),
        ("d = torch.device('xla')\nimport torch_xla.core.xla_model as xm", "'xla'", 0),
        ("importlib.import_module('torch_xla.runtime')", "importlib.import_module('torch_xla.runtime')", 1),
        ("import torch_neuronx", "import torch_neuronx", 1),
        # after the rewriting of its import it is in another module
        ("import optimum.neuron as on; on.trainers.NeuronTrainer", "optimum.neuron.trainers.NeuronTrainer", 0),
    ],
)
def test_what_is_left_for_hands(line: str, found: str, stays: int, tmp_path: Path) -> None:
    """Every device of xla and every import that stays is named, and the status says that there is work."""
    script = Script(f"{line}\n")
    assert found in [f.old for f in script.findings]
    assert script.stays == stays
    (tmp_path / "script.py").write_text(f"{line}\n")
    assert CliRunner().invoke(app, ["migrate", str(tmp_path), "--write"]).exit_code == 1


def test_scripts_for_optimum_neuron() -> None:
    """All ten names, by the modules from which scripts of several releases import them."""
    early, late = Script(OPTIMUM_EARLY), Script(OPTIMUM_LATE)
    imports = [line for line in early.rewritten().splitlines() if line.startswith("from ")]
    home = "tpcore_nxd.optimum_neuron"
    assert all(line.startswith(f"from {home} import ") for line in imports)
    assert [f for f in early.findings if f.new is None] == []
    assert at(early.findings, 13) == []  # a method of a class that has moved is that of the class here
    text = late.rewritten()
    names = "NeuronAccelerator NeuronTrainer TrainingNeuronConfig NeuronModelForCausalLM NeuronSFTTrainer"
    for name in (*names.split(), "consolidate_model_parallel_checkpoints_to_unified_checkpoint"):
        assert re.search(rf"from {home} import \(?\s*(\w+, )?{name}", text), name
    assert text.startswith(f"import {home} as on\n")
    assert at(late.findings, 10) == []  # on.NeuronTrainingArguments
    assert [f for f in late.findings if f.new is None] == []
    assert len({old.rpartition(".")[2] for old in TABLES if old.startswith("optimum.neuron.")}) == 21


def test_what_transformers_5_has_not_in_scripts_for_optimum_neuron() -> None:
    old = "from transformers import AutoConfig, is_torch_tpu_available\n"
    old += "from transformers.utils import check_min_version, send_example_telemetry\n"
    assert Script(old).rewritten() == old  # for whichever version its author has
    new = Script(old + "from optimum.neuron import Seq2SeqNeuronTrainer as Trainer\n")
    assert new.rewritten().splitlines() == [
        "from transformers import is_torch_xla_available as is_torch_tpu_available",
        "from transformers import AutoConfig",
        "from tpcore_nxd.optimum_neuron import send_example_telemetry",
        "from transformers.utils import check_min_version",
        "from tpcore_nxd.optimum_neuron import Seq2SeqNeuronTrainer as Trainer",
    ]
    assert [f.line for f in new.findings] == [1, 2, 3]
    assert not new.stays


@pytest.mark.parametrize("module", ["neuronx_distributed.parallel_layers", "megatron.core.parallel_state"])
def test_a_star_is_a_finding(module: str) -> None:
    assert [finding.line for finding in Script(f"from {module} import *\n").findings] == [1]


def test_formatting_stays() -> None:
    odd = "# ä\r\nif 1:\r\n\tfrom   neuronx_distributed.utils  import  ( logger ,\r\n\t\tbatch_utils )  # b\r\n"
    assert Script(odd).rewritten() == odd.replace("neuronx_distributed", "tpcore_nxd")
    plain = "x = 'neuronx_distributed'  # neuronx_distributed\nimport os\n"
    assert Script(plain).rewritten() == plain
    assert Script(plain).findings == []
    several = "import os, neuronx_distributed.parallel_layers.grads, sys\n"
    assert Script(several).rewritten() == (
        "import os, tpcore_nxd as neuronx_distributed, tpcore_nxd.parallel_layers.grads, sys\n"
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("neuronx_distributed.modules.moe.expert_mlps.ExpertMLPs", "capacity_factor="),
        ("neuronx_distributed.modules.moe.loss_function.load_balancing_loss_func", "output_router_logits=True"),
        ("neuronx_distributed.modules.moe.routing.RouterTopK", "docs/experts.md"),
        ("neuronx_distributed.ModelBuilder", "tpcore.trace.parallel_model_trace"),
        ("neuronx_distributed.NxDModel.load", "tpcore.trace.parallel_model_load"),
        ("neuronx_distributed.shard_checkpoint", "replace_weights"),
        ("neuronx_distributed.scripts.checkpoint_converter.CheckpointConverterBase", "tpcore checkpoint consolidate"),
        ("optimum.neuron.NeuronModelForCausalLM", "tpcore serve"),
        ("optimum.neuron.utils.is_neuronx_available", "delete it"),
        ("neuronx_distributed.utils.nothing_known", "delete it"),
    ],
)
def test_what_is_not_here_has_something_instead(name: str, instead: str) -> None:
    found = counterpart(name)
    assert found is not None
    assert found.new is None
    assert instead in found.note


def test_every_counterpart_is_there() -> None:
    """Each new name of the tables can be imported; those of TRL where that is, which is not among pinned packages."""
    for old, to in TABLES.items():
        module, _, name = str(to.new).rpartition(".")
        if find_spec("trl") or "SFT" not in name:
            assert hasattr(importlib.import_module(module), name), old


def test_words_of_the_command_line_do_not_reach_the_terminal_as_commands() -> None:
    for words in (["migrate", "no\x1b[31mne"], ["migrate", "--no\x1b[31mne"], ["no\x1b[31mne"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert "no\\x1b[31mne" in result.output
        assert "\x1b[31m" not in result.output


@pytest.mark.parametrize("write", [False, True])
def test_the_command(write: bool, tmp_path: Path) -> None:
    (tmp_path / "old.py").write_text(NXD_01)
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/library.py").write_text(NXD_18)
    done = CliRunner().invoke(app, ["migrate", str(tmp_path), *(["--write"] if write else [])])
    assert done.exit_code == 1, done.output
    assert "1 use of xla devices and groups" in done.output  # zero1_optimizer=True, which raises
    assert f"{tmp_path}/old.py:11: torch_xla.core.xla_model.optimizer_step -> tpcore_nxd.xla" in done.output
    assert "broken.py: not read, SyntaxError" in done.output
    assert "1 file with findings" in done.output
    assert (tmp_path / "old.py").read_text() == (Script(NXD_01).rewritten() if write else NXD_01)
    assert (tmp_path / ".venv/library.py").read_text() == NXD_18
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "broken.py")]).exit_code == 1
    stays = tmp_path / "stays.py"
    stays.write_text("import fairscale.nn.model_parallel.initialize as fs\n")
    done = CliRunner().invoke(app, ["migrate", str(tmp_path / "broken.py"), str(stays)])
    assert done.exit_code == 1
    assert "to change by hand: 1 import of other libraries" in done.output
    (tmp_path / "late.py").write_text(NXD_18)
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "late.py")]).exit_code == 1
    (tmp_path / "done.py").write_text("from neuronx_distributed.parallel_layers import layers\n")
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "done.py")]).exit_code == 0
    assert CliRunner().invoke(app, ["migrate", str(tmp_path / "none.py")]).exit_code == 2
    (tmp_path / "book.ipynb").write_text('{"cells": [{"source": ["import neuronx_distributed"]}], "metadata": {}}')
    done = CliRunner().invoke(app, ["migrate", str(tmp_path / "book.ipynb")])
    assert done.exit_code == 2
    assert "nbconvert" in done.output


XM = "import torch_xla.core.xla_model as xm\n"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"{XM}xm.all_reduce('sum', x, groups=g)  # a\n", None),
        ("from torch_xla.core.xla_model import (\n    mark_step as step,\n)\nstep()\n", None),
        ("import os, torch_xla.runtime as xr\n", None),
        ("import torch_xla\ntorch_xla.sync()\n", "import tpcore_nxd.xla as torch_xla\ntorch_xla.sync()\n"),
        (
            "if 1:\n    import torch_xla.distributed.xla_backend\ndist.init_process_group('xla')\n",
            "if 1:\n    import tpcore_nxd.xla as torch_xla, tpcore_nxd.xla.distributed.xla_backend\n"
            "dist.init_process_group('xla')\n",
        ),
        (
            f"{XM}x.to(\"xla\").cat(torch.ones(2, device='xla'))\n",
            f"{XM.replace('torch_', 'tpcore_nxd.')}x.to(xm.xla_device()).cat(torch.ones(2, device=xm.xla_device()))\n",
        ),
    ],
)
def test_scripts_for_torch_xla(text: str, want: str | None, tmp_path: Path) -> None:
    """Calls stay, devices become calls; the diff is what --write does, and the second time nothing is left."""
    script = Script(text)
    want = want or text.replace("torch_xla", "tpcore_nxd.xla")
    assert script.rewritten() == want
    (tmp_path / "s.py").write_text(text)
    done = CliRunner().invoke(app, ["migrate", str(tmp_path / "s.py"), "--diff"])
    assert done.exit_code == 0, done.output
    assert [line[1:] for line in done.stdout.splitlines()[2:] if line[0] in "+ "] == want.splitlines()
    found = json.loads(CliRunner().invoke(app, ["migrate", str(tmp_path / "s.py"), "--json"]).stdout)
    assert (found["imports_that_stay"], len(found["findings"])) == (0, len(script.findings))
    CliRunner().invoke(app, ["migrate", str(tmp_path / "s.py"), "--write"])
    assert (tmp_path / "s.py").read_text() == want
    assert Script(want).findings == []


# -- tpcore doctor ------------------------------------------------------------------------------------------
def test_the_report_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPCORE_BACKEND", "cpu_gloo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    for said in ("torch: ", "cores: ", "/dev/shm: ", "lo: ", "cpu_gloo (TPCORE_BACKEND is set)", "one process"):
        assert said in done.output
    assert "hidden" not in done.output
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert found["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert found["versions"]["tpcore"]
    assert ": usable here: groups of ranks" in found["backends"]["cpu_gloo"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (
            "try: from {old}.layers import ColumnParallelLinear, SPMDRank\nexcept ImportError: pass\n",
            "try: from {new}.layers import ColumnParallelLinear; from {old}.layers import SPMDRank\n"
            "except ImportError: pass\n",
        ),
        (
            "x = 1; from {old}.layers import ColumnParallelLinear, SPMDRank; y = 2\n",
            "x = 1; from {new}.layers import ColumnParallelLinear; from {old}.layers import SPMDRank; y = 2\n",
        ),
        (
            "if 1:\r\n\tfrom {old}.layers import ColumnParallelLinear, SPMDRank\r\n",
            "if 1:\r\n\tfrom {new}.layers import ColumnParallelLinear\r\n\tfrom {old}.layers import SPMDRank\r\n",
        ),
        ("from \\\n    {old} import grads\nx = 1\n", "from {new} import grads\nx = 1\n"),
        ("from neuronx_distributed . parallel_layers import grads\n", "from {new} import grads\n"),
        ("x = 1\r# a\nfrom {old} import grads\n", "x = 1\r# a\nfrom {new} import grads\n"),
    ],
)
def test_rewritten_scripts_are_python(text: str, want: str) -> None:
    """Imports behind another statement, over several lines, indented by tabs, and with all ends of lines."""
    old, new = "neuronx_distributed.parallel_layers", "tpcore_nxd.parallel_layers"
    rewritten = Script(text.format(old=old)).rewritten()
    assert rewritten == want.format(old=old, new=new)
    ast.parse(rewritten)
