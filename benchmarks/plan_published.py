"""Training runs that others published, for comparison with what is predicted from their configurations alone.

Step time and MFU: Megatron-LM's four models of Korthikanti et al. 2022 (arXiv 2205.05198, tables 3 and 5, figure 1,
as transcribed in github.com/calculon-ai/calculon, calculon/llm/validation.py), and torchtitan's Llama 3 (its
docs/performance.md at commit 9dec370 and benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md). Memory: of the former
alone; torchtitan's FSDP shards parameters and gradients too, so its memory is another's.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpcore_plan.choice import Choice
from tpcore_plan.machine import find
from tpcore_plan.predict import predict
from tpcore_plan.reduced import Reduced, Ways

from .harness import say

_MEGATRON = "arXiv 2205.05198, table 5 and figure 1"
_TITAN = "torchtitan 9dec370, docs/performance.md"
_ASYNC = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
_GIB = 2**30
PEAKS = {"a100x8": 312e12, "h100x8": 989.4e12}
"""FLOP/s of dense BF16 and FP16, by machine."""


@dataclass(frozen=True)
class Run:
    """``config``: of transformers. ``batch``: sequences a step, of all devices; ``microbatch``: of one. ``seconds`` of
    a step. ``memory``: bytes a device. ``mfu``: as published, if it was. ``beyond``: what the run has that tpcore's
    mesh has not."""

    name: str
    source: str
    machine: str
    config: Mapping[str, Any]
    mesh: Mapping[str, int]
    batch: int
    microbatch: int
    seq_len: int
    recompute: bool
    seconds: float
    memory: float | None = None
    mfu: float | None = None
    beyond: str = ""

    @property
    def devices(self) -> int:
        sizes = 1
        for size in self.mesh.values():
            sizes *= size
        return sizes

    @property
    def tokens_per_device(self) -> float:
        """A second."""
        return self.batch * self.seq_len / self.seconds / self.devices

    def utilization(self, seconds: float) -> float:
        """MFU of a step of ``seconds``: 6 FLOPs a parameter and token, and attention's 12 a layer, hidden feature,
        token and key (Narayanan et al. 2021, arXiv 2104.04473, eq. 3, without recomputation)."""
        layers, hidden, parameters = _sizes(self.config)
        flops = self.batch * self.seq_len * (6 * parameters + 12 * layers * hidden * self.seq_len)
        return flops / seconds / self.devices / PEAKS[self.machine]


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Layers, hidden features and parameters, without norms and biases."""
    if config["model_type"] == "gpt2":
        layers, hidden = config["n_layer"], config["n_embd"]
        return layers, hidden, 12 * layers * hidden**2 + config["vocab_size"] * hidden
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    keys = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * config["intermediate_size"]
    return layers, hidden, layers * layer + 2 * config["vocab_size"] * hidden


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 51_200, "n_positions": 2048, **sizes}


def _llama(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    more = {"num_key_value_heads": 8, "intermediate_size": intermediate, "vocab_size": 128_256}
    return {"model_type": "llama", **sizes, **more, "max_position_embeddings": 8192}


def _megatron(name: str, shape: tuple[int, int, int], pp: int, batch: int, seconds: float, gib: float) -> Run:
    """``gib``: GiB of figure 1, parameters and optimizer, and activations with sequence parallelism and selective
    recomputation, which keeps no attention scores: here, fused attention."""
    mesh, micro = {"pp": pp, "dp": 1, "tp": 8}, 4 if pp == 1 else 1
    beyond = "3 interleaved stages a device" if pp in (8, 35) else ""
    config = _gpt(*shape)
    run = (f"Megatron-LM {name}", _MEGATRON, "a100x8", config, mesh, batch, micro, 2048, False, seconds)
    return Run(*run, memory=gib * _GIB, beyond=beyond)


def _titan(
    name: str, config: Mapping[str, Any], machine: str, dp: int, tp: int, local: int, tokens: float, **more: Any
) -> Run:
    """``tokens``: a second and device. ``local``: sequences a step of one tp group."""
    mesh, batch = {"pp": 1, "dp": dp, "tp": tp}, dp * local
    seconds = batch * 8192 / (tokens * dp * tp)
    run = (f"torchtitan {name}", more.pop("source", _TITAN), machine, config, mesh, batch, local, 8192)
    return Run(*run, seconds=seconds, beyond="FSDP: parameters and gradients sharded over dp too", **more)


LLAMA_8B, LLAMA_70B = _llama(32, 4096, 32, 14336), _llama(80, 8192, 64, 28672)
LLAMA_405B = _llama(126, 16384, 128, 53248)
RUNS = (
    _megatron("22B", (48, 6144, 64), 1, 4, 1.10, 45.5625 + 9.5625),
    _megatron("175B", (96, 12288, 96), 8, 64, 13.75, 45.5625 + 12.3515625),
    _megatron("530B", (105, 20480, 128), 35, 280, 37.83, 31.640625 + 23.076171875),
    _megatron("1T", (128, 25600, 160), 64, 512, 71.49, 32.958984375 + 26.5625),
    _titan("Llama 3 8B", LLAMA_8B, "a100x8", 64, 1, 1, 2973, mfu=0.582, recompute=False),
    _titan("Llama 3 70B", LLAMA_70B, "a100x8", 64, 1, 1, 331, mfu=0.517, recompute=True),
    _titan("Llama 3.1 405B", LLAMA_405B, "h100x8", 16, 8, 2, 109, mfu=0.290, recompute=True),
    _titan("Llama 3 8B, tp", LLAMA_8B, "h100x8", 8, 8, 12, 4378, recompute=False, source=_ASYNC),
    _titan("Llama 3 70B, tp", LLAMA_70B, "h100x8", 32, 8, 16, 597.3, recompute=True, source=_ASYNC),
)


def compare_published() -> None:
    """Step time, MFU and memory of public runs, and what is predicted from their configurations."""
    say("| run | devices | published step | predicted | MFU | predicted | memory | predicted | not modelled |")
    say("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    with tempfile.TemporaryDirectory() as home:
        for run in RUNS:
            architecture = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[run.config["model_type"]]
            folder = Path(home, f"{RUNS.index(run)}")
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps({**run.config, "architectures": [architecture]}))
            machine = find(run.machine)
            machine = replace(machine, hosts=-(-run.devices // machine.per_host))
            sizes = run.mesh
            chosen = Choice(
                Ways(tp=sizes["tp"], sequence_parallel=sizes["tp"] > 1),
                pp=sizes["pp"],
                dp=sizes["dp"],
                microbatch=run.microbatch,
                microbatches=run.batch // sizes["dp"] // run.microbatch,
                recompute=run.recompute,
                zero1=True,
                bucket_mb=256,
            )
            p = predict(Reduced(str(folder), run.seq_len, torch.bfloat16), chosen, machine)
            memory = "" if run.memory is None else f"{run.memory / 2**30:.0f} GiB"
            mfu = run.utilization(run.seconds) if run.mfu is None else run.mfu
            times = f"{run.seconds:.2f} s | {p.step:.2f} s | {mfu:.0%} | {run.utilization(p.step):.0%}"
            say(f"| {run.name} | {run.devices} | {times} | {memory} | {p.nbytes / 2**30:.0f} GiB | {run.beyond} |")
