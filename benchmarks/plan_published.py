"""Training runs that others published, beside what is predicted from their configurations.

All are of BF16 or FP16 on A100 or H100, with mesh, microbatch, recomputation and step given. Of the rows in ``RUNS``,
in the order of their tables, the first and the last of every four are those that ``fit`` sees; the two between are kept
for the check. This rule was set before anything was fitted.

- Megatron-LM: Korthikanti et al. 2022 (arXiv 2205.05198), tables 3 and 5, memory from figure 1, as transcribed in
  github.com/calculon-ai/calculon: calculon/llm/validation.py, validation/seqsel/tab5
- torchtitan: docs/performance.md at commit 9dec370, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3) and
  benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md
- llm-foundry: github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md at commit 8c8dd48: 7B and larger,
  2048 tokens, 80 GB, 8, 32, 128 and 512 devices; MPT's shapes from scripts/train/yamls/pretrain
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tpcore_plan.choice import Choice
from tpcore_plan.execution import Execution
from tpcore_plan.machine import Machine
from tpcore_plan.predict import Prediction, predict
from tpcore_plan.published import Reached, gpus
from tpcore_plan.reduced import Reduced, Ways

from .harness import say

_GIB = 2**30
H100_500W = "h100x8-500w"
"""torchtitan's: 96 GB of HBM2e with 2.4 TB/s, and a limit of 500 W."""
PEAKS = {"a100x8": 312e12, "h100x8": 989.4e12, H100_500W: 989.4e12}
"""FLOP/s of dense BF16 and FP16, by machine."""


@dataclass(frozen=True)
class Run:
    """``config``: of transformers. ``batch``: sequences a step, of all devices; ``microbatch``: of one. ``seconds`` of
    a step. ``memory``: bytes a device. ``mfu``: as published, if it was."""

    source: str
    name: str
    machine: str
    config: Mapping[str, Any]
    mesh: tuple[int, int, int]
    """pp, dp, tp."""
    batch: int
    microbatch: int
    seq_len: int
    execution: Execution
    seconds: float
    memory: float | None = None
    mfu: float | None = None
    sequence_parallel: bool = True

    @property
    def devices(self) -> int:
        return math.prod(self.mesh)

    @property
    def choice(self) -> Choice:
        pp, dp, tp = self.mesh
        ways = Ways(tp=tp, sequence_parallel=self.sequence_parallel and tp > 1)
        sizes = (ways, pp, dp, self.microbatch, self.batch // dp // self.microbatch)
        return Choice(*sizes, zero1=True, bucket_mb=256, execution=self.execution)

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


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 51_200, dropout: float = 0.1) -> dict[str, Any]:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "resid_pdrop": dropout, "attn_pdrop": dropout}
    kind = {"model_type": "gpt2", "activation_function": "gelu", "n_positions": 2048}
    return {**kind, "vocab_size": vocab, "embd_pdrop": dropout, **sizes}


def _llama(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    more = {"num_key_value_heads": 8, "intermediate_size": intermediate, "vocab_size": 128_256}
    return {"model_type": "llama", **sizes, **more, "max_position_embeddings": 8192}


# -- the rows ------------------------------------------------------------------------------------------
def _megatron(
    name: str, shape: tuple[int, int, int], pp: int, batch: int, full: float, selective: float, gib: float
) -> Iterator[Run]:
    """A model with full recomputation and without sequence parallelism, and with the attention recomputed and sequence
    parallelism. ``gib``: of the latter, parameters, optimizer and activations."""
    interleaved = 3 if pp in (8, 35) else 1
    for recompute, seconds, memory in (("layers", full, None), ("attention", selective, gib * _GIB)):
        how = Execution(interleaved=interleaved, recompute=recompute, fused=True, scores=True)
        sizes = (_gpt(*shape), (pp, 1, 8), batch, 4 if pp == 1 else 1, 2048, how, seconds, memory)
        yield Run("Megatron-LM", f"{name}, recomputes {recompute}", "a100x8", *sizes, None, recompute == "attention")


def _titan(
    name: str,
    config: Mapping[str, Any],
    machine: str,
    mesh: tuple[int, int],
    local: int,
    tokens: float,
    how: Execution,
    **more: Any,
) -> Run:
    """``tokens``: a second and device. ``local``: sequences a step of one tp group."""
    dp, tp = mesh
    seconds = dp * local * 8192 / (tokens * dp * tp)
    return Run("torchtitan", name, machine, config, (1, dp, tp), dp * local, local, 8192, how, seconds, **more)


def _foundry(
    name: str, machine: str, devices: int, micro: int, accumulated: int, tokens: float, again: bool = True
) -> Run:
    """``tokens``: a second and device."""
    shape = {"7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56), "70B": (80, 8192, 64)}[name]
    how = Execution(recompute="layers" if again else "nothing", overlap=("dp",), sharded=True)
    batch = devices * micro * accumulated
    config, seconds = _gpt(*shape, vocab=50_368, dropout=0.0), batch * 2048 / (tokens * devices)
    title = f"MPT {name}{'' if again else ', no recomputation'}"
    return Run("llm-foundry", title, machine, config, (1, devices, 1), batch, micro, 2048, how, seconds)


LLAMA_8B, LLAMA_70B = _llama(32, 4096, 32, 14336), _llama(80, 8192, 64, 28672)
LLAMA_405B = _llama(126, 16384, 128, 53248)
_FSDP = Execution(recompute="half", overlap=("dp",), sharded=True)
_COMPILED = replace(_FSDP, fused=True)
_LAYERS = replace(_COMPILED, recompute="layers")
_ASYNC = ("dp", "tp")
RUNS = (
    *_megatron("22B", (48, 6144, 64), 1, 4, 1.42, 1.10, 45.5625 + 9.5625),
    *_megatron("175B", (96, 12288, 96), 8, 64, 18.13, 13.75, 45.5625 + 12.3515625),
    *_megatron("530B", (105, 20480, 128), 35, 280, 49.05, 37.83, 31.640625 + 23.076171875),
    *_megatron("1T", (128, 25600, 160), 64, 512, 94.42, 71.49, 32.958984375 + 26.5625),
    _titan("Llama 3 8B", LLAMA_8B, "a100x8", (64, 1), 1, 2973, _COMPILED, mfu=0.582),
    _titan("Llama 3 70B", LLAMA_70B, "a100x8", (64, 1), 1, 331, _LAYERS, mfu=0.517),
    _titan("Llama 3.1 405B", LLAMA_405B, H100_500W, (16, 8), 2, 109, _LAYERS, mfu=0.290),
    _titan("Llama 3.1 8B, eager", LLAMA_8B, H100_500W, (8, 1), 2, 5762, _FSDP, memory=82.4 * _GIB),
    _titan("Llama 3.1 8B", LLAMA_8B, H100_500W, (8, 1), 2, 6667, _COMPILED, memory=77.0 * _GIB),
    _titan("Llama 3.1 8B, eager", LLAMA_8B, H100_500W, (128, 1), 2, 5605, _FSDP, memory=67.0 * _GIB),
    _titan("Llama 3.1 8B", LLAMA_8B, H100_500W, (128, 1), 2, 6514, _COMPILED, memory=62.0 * _GIB),
    _titan("Llama 3.1 70B", LLAMA_70B, H100_500W, (32, 8), 16, 597.3, _LAYERS),
    _titan("Llama 3.1 70B, async tp", LLAMA_70B, H100_500W, (32, 8), 16, 652.4, replace(_LAYERS, overlap=_ASYNC)),
    _titan("Llama 3.1 8B", LLAMA_8B, H100_500W, (8, 8), 12, 4378, _COMPILED),
    _titan("Llama 3.1 8B, async tp", LLAMA_8B, H100_500W, (8, 8), 12, 4809.4, replace(_COMPILED, overlap=_ASYNC)),
    _foundry("70B", "h100x8", 512, 8, 1, 1007),
    _foundry("70B", "h100x8", 128, 8, 1, 1058),
    _foundry("30B", "h100x8", 512, 8, 1, 2115),
    _foundry("30B", "h100x8", 128, 8, 1, 2199),
    _foundry("13B", "h100x8", 512, 16, 1, 4952),
    _foundry("13B", "h100x8", 128, 16, 1, 5080),
    _foundry("7B", "h100x8", 512, 6, 1, 9670, again=False),
    _foundry("7B", "h100x8", 128, 6, 1, 10475, again=False),
    _foundry("70B", "h100x8", 32, 2, 16, 882),
    _foundry("30B", "h100x8", 32, 14, 3, 2308),
    _foundry("30B", "h100x8", 8, 3, 21, 2002),
    _foundry("13B", "h100x8", 32, 2, 1, 4811, again=False),
    _foundry("13B", "h100x8", 8, 2, 1, 4792, again=False),
    _foundry("7B", "h100x8", 8, 6, 1, 10643, again=False),
    _foundry("70B", "a100x8", 32, 2, 16, 373),
    _foundry("30B", "a100x8", 8, 3, 21, 916),
    _foundry("13B", "a100x8", 8, 2, 3, 2262, again=False),
    _foundry("7B", "a100x8", 8, 6, 2, 4641, again=False),
)
FITTED = tuple(run for i, run in enumerate(RUNS) if i % 4 in (0, 3))
KEPT = tuple(run for i, run in enumerate(RUNS) if i % 4 in (1, 2))


# -- predicted -----------------------------------------------------------------------------------------
Figures = Mapping[str, float]
_START = {"a100": 0.8, "h100": 0.7, "a100_attention": 0.7, "h100_attention": 0.5}
_START |= {"link": 0.8, "memory": 0.9, "beside": 0.2, "fused": 0.5}
_BOUNDS = {"a100": (0.6, 0.95), "h100": (0.5, 0.9), "a100_attention": (0.4, 1.0), "h100_attention": (0.3, 1.0)}
_BOUNDS |= {"link": (0.5, 0.95), "memory": (0.6, 1.0), "beside": (0.0, 1.0), "fused": (0.2, 1.0)}
_PRIOR = 0.02  # what a squared distance from the start, in parts of the bounds, weighs beside a squared error


class Models:
    """The recorded models of the runs."""

    def __init__(self, home: Path) -> None:
        self._home, self._models = home, dict[str, Reduced]()

    def predict(self, run: Run, figures: Figures | None = None) -> Prediction:
        """With the published machine, or with one that reaches ``figures``."""
        architecture = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[run.config["model_type"]]
        text = json.dumps({**run.config, "architectures": [architecture]}, sort_keys=True)
        if text not in self._models:
            folder = self._home / f"{len(self._models)}"
            folder.mkdir()
            (folder / "config.json").write_text(text)
            self._models[text] = Reduced(str(folder), run.seq_len, torch.bfloat16)
        return predict(self._models[text], run.choice, _machine(run, figures))

    def error(self, run: Run, figures: Figures | None = None) -> float:
        """The logarithm of the predicted step over the published one."""
        return math.log(self.predict(run, figures).step / run.seconds)

    def off(self, run: Run, figures: Figures | None = None) -> float:
        return abs(math.exp(self.error(run, figures)) - 1)


def _machine(run: Run, figures: Figures | None) -> Machine:
    name, bandwidth = run.machine.removesuffix("-500w"), 2.4e12 if run.machine == H100_500W else None
    reached = None
    if figures is not None:
        kind = name.removesuffix("x8")
        link, memory, beside, fused = (figures[field] for field in ("link", "memory", "beside", "fused"))
        reached = Reached(figures[kind], figures[f"{kind}_attention"], link, memory, beside, fused)
    machine = gpus(name, reached, bandwidth)
    return replace(machine, hosts=-(-run.devices // machine.per_host))


def fit(models: Models, runs: Sequence[Run]) -> dict[str, float]:
    """Figures inside bounds that bring the runs' steps nearest to the published ones, by squares of logarithms: each
    figure is moved as long as that helps, then by half as much."""

    def loss(figures: Figures) -> float:
        away = sum(((figures[k] - _START[k]) / (high - low)) ** 2 for k, (low, high) in _BOUNDS.items())
        return sum(models.error(run, figures) ** 2 for run in runs) + _PRIOR * away

    found, part = dict(_START), 0.16
    best = loss(found)
    while part > 0.005:
        before = best
        for name, (low, high) in _BOUNDS.items():
            for move in (part * (high - low), part * (low - high)):
                other = {**found, name: min(max(found[name] + move, low), high)}
                if (value := loss(other)) < best:
                    found, best = other, value
                    break
        part /= 1 if best < before else 2
    return found


def compare_published() -> None:
    """Public runs beside predictions, with the fit that the published machines have its figures from."""
    with tempfile.TemporaryDirectory() as home:
        models = Models(Path(home))
        say("| run | devices | published step | predicted | off | MFU | memory | predicted | |")
        say("|---|---:|---:|---:|---:|---:|---:|---:|---|")
        for run in RUNS:
            p = models.predict(run)
            memory = "|" if run.memory is None else f"{run.memory / _GIB:.0f} GiB | {p.nbytes / _GIB:.0f} GiB"
            mfu = run.utilization(run.seconds) if run.mfu is None else run.mfu
            times = f"{run.seconds:.2f} s | {p.step:.2f} s | {p.step / run.seconds - 1:+.0%} | {mfu:.0%}"
            device = "A100" if run.machine == "a100x8" else "H100"
            half = "fitted" if run in FITTED else "kept"
            say(f"| {run.source} {run.name} | {run.devices} {device} | {times} | {memory} | {half} |")
        for name, runs in (("fitted", FITTED), ("kept", KEPT)):
            say(f"\n{name}: {_summary([models.off(run) for run in runs])}")
        fitted = fit(models, FITTED)
        say(f"\nfigures that this fit finds: {', '.join(f'{k} {v:.2f}' for k, v in fitted.items())}")
        say(f"started from, without a fit: {_summary([models.off(run, _START) for run in RUNS])}")
        for source in dict.fromkeys(run.source for run in RUNS):
            others = fit(models, [run for run in RUNS if run.source != source])
            offs = [models.off(run, others) for run in RUNS if run.source == source]
            say(f"{source}, fitted to the other sources alone: {_summary(offs)}")


def _summary(offs: Sequence[float]) -> str:
    return f"{len(offs)} runs, median error {statistics.median(offs):.1%}, largest {max(offs):.0%}"
