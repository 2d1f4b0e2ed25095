"""``tpcore export`` says what an engine would stumble over, and nothing of folders that it serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import peft
import pytest
import torch
import transformers
from helpers import hf
from helpers.places import ROOT
from helpers.tiers import tiers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers.models.auto import modeling_auto
from typer.testing import CliRunner

import tpcore
from benchmarks import engines as maker
from tpcore import Mesh, checkpoint
from tpcore.cli.app import app
from tpcore.testing import run_ranks
from tpcore_hf.engines.handover import engines

# peft asks transformers by a name that it has given up
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
Change = Callable[[Path], None]


def said(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["export", str(folder), "--json", *options])
    return result.exit_code, json.loads(result.stdout) if result.exit_code < 2 else {"error": result.stderr}


def written(folder: Path, make: Callable[[], Any]) -> Path:
    """The model's folder with a tokenizer of as many tokens."""
    torch.manual_seed(0)
    model = make().bfloat16()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    add_tokenizer(folder, 99)
    return folder


def add_tokenizer(folder: Path, size: int) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, chat_template="{{ messages }}")
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("plain"), hf.llama)


def entries(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({k: v for k, v in {**old, **values}.items() if v is not None}))

    return change


config, generation = partial(entries, "config.json"), partial(entries, "generation_config.json")


def tensors(edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file({k: t.contiguous() for k, t in edit(load_file(path)).items()}, path)

    return change


def renamed(prefix: str) -> Change:
    return tensors(lambda old: {prefix + name: t for name, t in old.items()})


def without(name: str) -> Change:
    return tensors(lambda old: {k: t for k, t in old.items() if k != name})


def adapted(folder: Path) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)


def in_shards(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    def rank(_: tpcore.ParallelContext) -> None:
        checkpoint.save({"model": tpcore.parallelize(hf.llama()).state_dict()}, str(folder / "step"))

    run_ranks(Mesh({"tp": 2}), rank)
    for path in (folder / "step").iterdir():
        path.rename(folder / path.name)


def padded(old: dict[str, Tensor]) -> dict[str, Tensor]:
    tables = ("lm_head.weight", "model.embed_tokens.weight")
    return {k: torch.cat([t, t[:29]]) if k in tables else t for k, t in old.items()}


ADAPTER = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}


def adapter_alone(**values: Any) -> Change:
    def change(folder: Path) -> None:
        adapted(folder)
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink()
        entries("adapter_config.json", **{**ADAPTER, **values})(folder)

    return change


CASES: dict[str, tuple[Change, list[str], set[str]]] = {
    # change, options, what is wrong
    "nothing": (lambda _: None, [], set()),
    "nothing, for sglang": (lambda _: None, ["--for", "sglang"], set()),
    "nothing, for transformers": (lambda _: None, ["--for", "transformers"], set()),
    "unknown": (config(architectures=["FooForCausalLM"]), [], {"architecture"}),
    "none": (config(architectures=None), ["--for", "transformers"], {"architecture"}),
    "gone from the engine": (config(architectures=["AquilaForCausalLM"]), [], {"architecture"}),
    "of a compiled model": (renamed("_orig_mod."), [], {"names"}),
    "of a wrapper": (renamed("module."), ["--for", "transformers"], {"names"}),
    "a tensor less": (without("model.norm.weight"), [], {"names"}),
    "a head that is not there": (without("lm_head.weight"), [], {"names"}),
    "adapters not merged": (
        tensors(lambda old: {**old, "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)}),
        [],
        {"names"},
    ),
    "a padded table": (tensors(padded), [], {"vocabulary"}),
    "another size": (config(intermediate_size=65), [], {"shapes"}),
    "a head of its own": (config(tie_word_embeddings=True), [], {"ties"}),
    "a tied head that is there": (
        lambda f: (tensors(lambda old: {**old, "lm_head.weight": old["model.embed_tokens.weight"].clone()})(f),
                   config(tie_word_embeddings=True)(f))[0],
        [],
        set(),
    ),
    "the name of the head alone": (
        lambda f: (without("model.embed_tokens.weight")(f), config(tie_word_embeddings=True)(f))[0],
        [],
        {"names"},
    ),
    "an adapter beside": (adapted, [], {"adapters"}),
    "an adapter beside, for transformers": (adapted, ["--for", "transformers"], set()),
    "quantized by name alone": (config(quantization_config={"quant_method": "fp8"}), [], {"quantization"}),
    "by a method of another": (
        lambda f: (config(quantization_config={"quant_method": "bitsandbytes"})(f),
                   tensors(lambda old: {**old, "model.norm.weight": old["model.norm.weight"].to(torch.int8)})(f))[0],
        [],
        {"quantization"},
    ),
    "bytes without scales": (
        tensors(lambda old: {k: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for k, t in old.items()}),
        [],
        {"quantization"},
    ),
    "heads of three ranks": (lambda _: None, ["--tp", "3"], {"tp"}),
    "key heads in halves": (lambda _: None, ["--tp", "4"], set()),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), [], {"tokenizer"}),
    "tokens above the table": (lambda f: add_tokenizer(f, 120), [], {"tokenizer"}),
    "an end that is no token": (generation(eos_token_id=[2, 99]), [], {"generation"}),
    "a generation config of no sense": (
        lambda f: (f / "generation_config.json").write_text("[1]") and None,
        [],
        {"generation"},
    ),
    **{f"an end that is {v!r}": (generation(eos_token_id=v), [], {"generation"}) for v in ("</s>", 2.5, [True])},
    "an impossible temperature": (generation(temperature=-1), ["--for", "sglang"], {"generation"}),
    "an impossible top_p": (generation(top_p="all"), [], {"generation"}),
    "a name for a list": (config(architectures="LlamaForCausalLM"), [], {"architecture"}),
    **{
        f"{name}={value!r}": (config(**{name: value}), ["--for", engine], {"configuration"})
        for name, value, engine in (
            ("model_type", "frob", "vllm"),
            ("model_type", "mistral", "sglang"),
            ("vocab_size", "99", "transformers"),
            ("num_attention_heads", 0, "vllm"),
            ("dtype", "float17", "transformers"),
            ("quantization_config", "awq", "vllm"),
            ("rope_parameters", {"rope_type": "frob"}, "transformers"),
        )
    },
    "a Llama of another type": (config(model_type="iquestcoder"), [], set()),
    "what old files have in each layer": (
        tensors(lambda old: {**old, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        [],
        set(),
    ),
    "float8 without scales": (
        lambda f: (
            config(quantization_config={"quant_method": "fp8"})(f),
            tensors(lambda old: {k: t.to(torch.float8_e4m3fn) if "proj" in k else t for k, t in old.items()})(f),
        )[0],
        [],
        {"quantization"},
    ),
    "no file": (lambda f: (f / "model.safetensors").unlink(), [], {"files"}),
    "half a file": (lambda f: (f / "model.safetensors").write_bytes(b"\1") and None, [], {"files"}),
    "an index of a file that is not there": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            entries("model.safetensors.index.json", weight_map={"lm_head.weight": "model-2.safetensors"})(f),
        )[1],
        ["--for", "transformers"],
        {"files"},
    ),
    "an adapter without a number": (adapter_alone(r="8"), ["--for", "transformers"], {"adapters"}),
    "an adapter of strange ranks": (adapter_alone(rank_pattern=[1]), [], {"adapters"}),
    "half an adapter": (
        lambda f: (adapter_alone()(f), (f / "adapter_model.safetensors").write_bytes(b"\1"))[0],
        ["--for", "transformers"],
        {"files"},
    ),
    "an adapter's file of something else": (
        lambda f: (adapter_alone()(f), save_file({"a": torch.ones(1)}, f / "adapter_model.safetensors"))[0],
        [],
        {"names"},
    ),
    "a sharded checkpoint": (in_shards, [], {"files"}),
    "an adapter": (adapter_alone(), [], set()),
    "an adapter of a rank too large": (adapter_alone(rank_pattern={"q_proj": 1024}), [], {"adapters"}),
    "an adapter with DoRA": (adapter_alone(use_dora=True), ["--for", "sglang"], {"adapters"}),
    "an adapter with biases": (adapter_alone(bias="all"), [], {"adapters"}),
    "another kind of adapter": (adapter_alone(peft_type="IA3"), [], {"adapters"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and:UserWarning")
def test_what_is_wrong_is_an_error_with_its_remedy(name: str, plain: Path, tmp_path: Path) -> None:
    change, options, wrong = CASES[name]
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    change(folder)
    code, document = said(folder, *options)
    errors = [finding for finding in document["findings"] if finding["level"] == "error"]
    assert {finding["subject"] for finding in errors} == wrong, document
    assert all(finding["remedy"] for finding in document["findings"])
    assert (code, document["takes"]) == ((1, False) if wrong else (0, True))


NOTES: dict[str, tuple[Change, str, str]] = {
    "float32": (config(dtype="float32"), "dtype", "--dtype float32"),
    "rounded": (config(dtype="float16"), "dtype", "bfloat16"),
    "float64": (config(dtype="float64"), "dtype", "float64"),
    "no end": (lambda f: (generation(eos_token_id=None)(f), config(eos_token_id=None)(f))[0], "generation", "eos"),
    "defaults": (generation(temperature=0.6, do_sample=True), "generation", "--generation-config vllm"),
    "a newer transformers": (config(transformers_version="99.1"), "configuration", "newer"),
    "through transformers": (
        config(architectures=["SmolLM3ForCausalLM"], model_type="smollm3"),
        "architecture",
        "smallest",
    ),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_the_engine_does_otherwise_is_told(name: str, plain: Path, tmp_path: Path) -> None:
    change, subject, remedy = NOTES[name]
    folder = tmp_path / "model"
    shutil.copytree(plain, folder)
    change(folder)
    found = [finding for finding in said(folder)[1]["findings"] if finding["subject"] == subject]
    assert any(remedy in finding["remedy"] + finding["text"] for finding in found), found


FAMILIES: dict[str, Callable[[], Any]] = {
    "experts": hf.mixtral,
    "fused": hf.phi3,
    "tied": partial(hf.llama, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**hf.GPT2, bos_token_id=2, eos_token_id=2)),
    "encoder": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**hf.T5)),
}


@pytest.mark.parametrize("name", tiers(["experts", "tied"], slow=["fused", "gpt2", "encoder"]))
def test_what_a_sharded_model_writes_is_taken(name: str, tmp_path: Path) -> None:
    def rank(_: tpcore.ParallelContext) -> None:
        torch.manual_seed(0)
        model: Any = tpcore.parallelize(FAMILIES[name]())
        model.generation_config.eos_token_id = 2
        model.save_pretrained(tmp_path)

    run_ranks(Mesh({"tp": 2}), rank)
    add_tokenizer(tmp_path, 99)
    engine = "transformers" if name == "encoder" else "vllm"  # vLLM has no T5
    assert said(tmp_path, "--for", engine, "--tp", "2")[0] == 0


@pytest.mark.parametrize(
    ("content", "message"), [({}, "config.json"), ({"config.json": "{"}, "not JSON"), ({"config.json": "[]"}, "object")]
)
def test_what_is_no_model_is_said(content: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    code, document = said(tmp_path)
    assert code == 2
    assert message in document["error"]


def table() -> str:
    """Families that work here, by what the engines do with their language model."""
    page = (ROOT / "docs" / "families.md").read_text().partition("## Work")[2].partition("## Multimodal")[0]
    works = {part for line in page.splitlines() for part in line.split("`")[1::2]}
    kinds = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    rows: dict[tuple[str, ...], list[str]] = {}
    decoders = [f for f in works & kinds.keys() if getattr(transformers.AutoConfig.for_model(f), "is_decoder", True)]
    for family in sorted(decoders):
        rows.setdefault(tuple(engine.road(kinds[family]) for engine in engines().values()), []).append(family)
    words = {"own": "yes", "transformers": "through transformers", "": "no"}
    lines = [
        f"| {' | '.join(words[road] for road in key)} | {', '.join(f'`{f}`' for f in rows[key])} |"
        for key in sorted(rows, reverse=True)
    ]
    head = " | ".join(map(str, engines().values()))
    return "\n".join([f"| {head} | families |", "|---|---|---|", *lines])


@pytest.mark.skipif("inkling2_text" not in transformers.CONFIG_MAPPING, reason="the page has families of 5.24")
def test_the_page_has_the_table_of_the_engines_lists() -> None:
    """A new one: ``python -c "import test_engines; print(test_engines.table())"`` in this folder."""
    assert table() in (ROOT / "docs" / "after-training.md").read_text()


REGISTRY = """
_TEXT_MODELS = {"OneForCausalLM": ("one", "One")}
_SPECULATIVE_DECODING_MODELS = {"Draft": ("draft", "Draft")}
_TRANSFORMERS_SUPPORTED_MODELS = {"TwoForCausalLM": ("transformers", "Two")}
_VLLM_MODELS = {**_TEXT_MODELS, **_SPECULATIVE_DECODING_MODELS, **_TRANSFORMERS_SUPPORTED_MODELS}
_PREVIOUSLY_SUPPORTED_MODELS = {"OldForCausalLM": "0.9.2"}
"""
WHEELS = {
    "vllm-0.99.0-py3.whl": {
        "vllm/model_executor/models/registry.py": REGISTRY,
        "vllm/model_executor/layers/quantization/__init__.py": "method_to_config: dict = {'fp8': F, 'online': O}",
        "vllm/config/model.py": "_FLOAT16_NOT_SUPPORTED_MODELS = {'gemma2': 'unstable'}",
        "vllm/config/lora.py": "MaxLoRARanks = Literal[1, 8]",
    },
    "sglang-0.99.0-py3.whl": {
        "sglang/srt/models/one.py": "EntryClass = One",
        "sglang/srt/models/two.py": "EntryClass = [Two, TransformersForCausalLM]",
        "sglang/srt/arg_groups/choices.py": "QUANTIZATION_CHOICES = ['awq', 'unquant']",
        "sglang/srt/layers/quantization/__init__.py": "BASE_QUANTIZATION_METHODS: Dict[str, T] = {'int8': I}",
    },
}


def test_the_table_is_read_out_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = maker.TABLE.read_text()
    assert maker.written(json.loads(text)) == text
    (tmp_path / "table").write_text(text)
    for name, files in WHEELS.items():
        with ZipFile(tmp_path / name, "w") as wheel:
            for path, source in files.items():
                wheel.writestr(path, source)
    wheels = [str(tmp_path / name) for name in WHEELS]
    monkeypatch.setattr("sys.argv", ["engines", *wheels, "--table", str(tmp_path / "table")])
    maker.main()
    found = json.loads((tmp_path / "table").read_text())
    vllm = {"own": ["OneForCausalLM"], "through": ["TwoForCausalLM"], "gone": {"OldForCausalLM": "0.9.2"}}
    vllm |= {"quantization": ["fp8"], "not_float16": ["gemma2"], "lora_ranks": [1, 8], "version": "0.99.0"}
    assert found["vllm"].items() >= vllm.items()
    assert "/v0.99.0/" in found["vllm"]["source"]
    assert found["vllm"]["adapter"] == json.loads(text)["vllm"]["adapter"], "of no list"
    sglang = {"own": ["One", "Two"], "quantization": ["awq", "int8"], "version": "0.99.0"}
    assert found["sglang"].items() >= sglang.items()
