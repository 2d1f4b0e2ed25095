"""TRL's trainers on a mesh: the losses of its own in one process. TRL and what it needs take 280 MB,
so they are not among the pinned packages."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import hf
from helpers import programs as forked
from helpers.places import ROOT
from helpers.rank_pool import RankPool
from helpers.trainers import ROUNDS
from tokenizers import Tokenizer, models, pre_tokenizers

import tpcore
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks

pytest.importorskip("trl", reason="trl is not installed: pip install trl")
pytest.importorskip("datasets")

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.filterwarnings("ignore")]  # theirs, of many kinds
LAST = 60


@pytest.fixture(scope="module", params=[2, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(request.param) as ranks:
        yield ranks


def tokenizer() -> Any:
    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(LAST))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names)


def data(columns: dict[str, int]) -> Any:
    """Rows of random words; lengths vary."""
    import datasets.fingerprint

    # it pickles tables by a way that not every pair of pyarrow and dill has
    datasets.fingerprint.Hasher.hash = classmethod(lambda *_: uuid.uuid4().hex)
    numbers = torch.Generator().manual_seed(1)
    rows = []
    for i in range(32):
        lengths = {name: length + i % 3 for name, length in columns.items()}
        words = {name: torch.randint(LAST, (n,), generator=numbers).tolist() for name, n in lengths.items()}
        rows.append({name: " ".join(f"w{word}" for word in found) + " " for name, found in words.items()})
    return datasets.Dataset.from_list(rows)


def model() -> Any:
    torch.manual_seed(0)
    return hf.llama(vocab_size=65, max_position_embeddings=64, pad_token_id=3, bos_token_id=1, eos_token_id=2)


SAMPLED = {"num_generations": 2, "max_completion_length": 4, "steps_per_generation": 1}
KINDS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "completions": ("SFT", {"prompt": 4, "completion": 5}, {}),
    "packed": ("SFT", {"text": 6}, {"packing": True}),
    "preferences": ("DPO", {"prompt": 4, "chosen": 5, "rejected": 6}, {}),
    "rewards": ("Reward", {"chosen": 5, "rejected": 6}, {}),
    "labels": ("KTO", {"prompt": 4, "completion": 5}, {"loss_type": "apo_zero_unpaired"}),  # has no pairs
    "labels, in pairs of a rank": ("KTO", {"prompt": 4, "completion": 5}, {}),
    "groups": ("GRPO", {"prompt": 4}, {**SAMPLED, "beta": 0.1}),
    "groups without a reference": ("GRPO", {"prompt": 4}, {**SAMPLED, "num_iterations": 2}),
    "groups over two steps of a rank": ("GRPO", {"prompt": 4}, {**SAMPLED, "steps_per_generation": 2}),
    "leave one out": ("RLOO", {"prompt": 4}, {**SAMPLED, "beta": 0.1}),
}


def reward(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Of a prompt and a completion, other for each of a group, whose completions are the same."""
    return [
        len(prompt) % 5 + i % 2 + completion.count("w1")
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


GENERATES = ("GRPO", "RLOO")


def judge() -> Any:
    """A model of one label."""
    config, _ = model().config, torch.manual_seed(0)
    config.num_labels = 1
    return transformers.LlamaForSequenceClassification(config)


def stored(where: Path) -> Any:
    """With a directory, from which TRL loads its reference."""
    if not (where / "model").exists():
        model().save_pretrained(where / "model")
    return transformers.AutoModelForCausalLM.from_pretrained(where / "model")


def told(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
    """In place of ``generate``, whose random numbers differ on each data-parallel rank: other tokens for each of a
    group, by the prompt."""
    numbers = torch.arange(len(input_ids)) % SAMPLED["num_generations"] * 7 + (input_ids * attention_mask).sum(1)
    return torch.cat([input_ids, 4 + (numbers[:, None] + torch.arange(4) * 3) % LAST], 1)


def losses(where: Path, kind: str, adapters: bool, module: Any, whole: Any, batch: int, **options: Any) -> list[float]:
    """Of ``module``'s trainer. ``whole``: what becomes of the model first."""
    import trl
    from peft import LoraConfig

    name, columns, chosen = KINDS[kind]
    common = {"per_device_train_batch_size": batch, "max_steps": 4, "logging_steps": 1, "learning_rate": 1e-2}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    sizes = {"save_strategy": "no", "output_dir": str(where), **({} if name in GENERATES else {"max_length": 16})}
    arguments = getattr(trl, f"{name}Config")(**common, **quiet, **sizes, **chosen)
    if adapters:
        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    elif name in ("DPO", "KTO"):
        options["ref_model"] = whole(model())
    made = getattr(module, f"{name}Trainer")
    rows = data(columns)
    if name == "KTO":
        rows = rows.add_column("label", [i % 3 > 0 for i in range(len(rows))])
    if name in GENERATES:
        options["reward_funcs"] = reward
    options["model"] = whole(judge() if name == "Reward" else stored(where) if name in GENERATES else model())
    if options.pop("told") and name in GENERATES:
        options["model"].generate = told
    trainer = made(args=arguments, train_dataset=rows, processing_class=tokenizer(), **options)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _on_mesh(ctx: tpcore.ParallelContext, where: Path, kind: str, adapters: bool) -> list[float]:
    from tpcore_hf import trl

    dp = ctx.comm("dp").size
    return losses(where, kind, adapters, trl, tpcore.parallelize, 4 // dp, told=dp > 1, zero1=dp > 1)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process(pool: RankPool, tmp_path: Path, kind: str, adapters: bool) -> None:
    import trl

    if kind.endswith("of a rank") and pool.size > 2:
        return  # TRL pairs and shuffles each data-parallel rank's examples by themselves
    want = losses(tmp_path, kind, adapters, trl, lambda whole: whole, 4, told=pool.size > 2)
    degrees = {"dp": pool.size // 2, "tp": 2}
    for got in pool.run(Mesh(degrees), _on_mesh, tmp_path, kind, adapters):
        assert got == pytest.approx(want, rel=ROUNDS["rtol"], abs=ROUNDS["atol"])


def _as_optimum_neuron(ctx: Any, where: Path, sizes: dict[str, Any]) -> list[float]:
    """As its published scripts do: flags, a sharded model, a configuration out of the flags, and the trainer."""
    from peft import LoraConfig

    from tpcore_nxd import optimum_neuron as optimum

    flags = ["--output_dir", str(where / "out"), "--max_steps", "4", "--logging_steps", "1", "--report_to", "none"]
    flags += ["--per_device_train_batch_size", "2", "--learning_rate", "1e-2", "--save_strategy", "no"]
    flags += [f"--{name}={value}" for name, value in sizes.items()]
    (arguments,) = transformers.HfArgumentParser(optimum.NeuronTrainingArguments).parse_args_into_dataclasses(flags)
    made = optimum.NeuronModelForCausalLM.from_pretrained(
        where / "model", arguments.trn_config, dtype=torch.float32, use_flash_attention_2=True
    )
    trainer = optimum.NeuronSFTTrainer(
        args=optimum.NeuronSFTConfig(max_seq_length=16, packing=True, **arguments.to_dict()),
        model=made,
        peft_config=LoraConfig(r=4, target_modules=["embed_tokens", "q_proj", "down_proj"], task_type="CAUSAL_LM"),
        tokenizer=tokenizer(),
        train_dataset=data({"instruction": 6}),
        formatting_func=lambda example: example["instruction"],
    )
    trainer.train()
    trainer.save_model(str(where / "adapters"))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_script_of_optimum_neuron(tmp_path: Path) -> None:
    import peft

    model().save_pretrained(tmp_path / "model")
    (want,) = run_ranks(Mesh({"dp": 1, "tp": 1}), lambda ctx: _as_optimum_neuron(ctx, tmp_path, {}))
    sizes = {"tensor_parallel_size": 2, "zero_1": True}  # and sequence parallelism, as by default
    with RankPool(2) as ranks:
        for got in ranks.run(Mesh({"dp": 1, "tp": 2}), _as_optimum_neuron, tmp_path, sizes):
            assert got == pytest.approx(want, rel=ROUNDS["rtol"], abs=ROUNDS["atol"])
    opened = peft.PeftModel.from_pretrained(model(), tmp_path / "adapters")
    assert any(p.abs().sum() > 0 for name, p in opened.named_parameters() if "lora_B" in name)


def test_the_example_earns_more(tmp_path: Path) -> None:
    words = ["torchrun", "--standalone", "--nproc-per-node=2", str(ROOT / "examples" / "grpo.py"), "--rounds", "10"]
    done = forked.run(words, tmp_path, {**os.environ, "TPCORE_BACKEND": "cpu_gloo", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = map(float, re.findall(r"\d\.\d\d", done.stdout.splitlines()[-1]))
    assert before < 0.7 < 0.8 < after  # a random policy has 0.5
