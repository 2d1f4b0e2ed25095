"""Scripts of optimum-neuron after changing their imports: same losses, saved in parts, consolidated."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from helpers.rank_pool import RankPool
from helpers.trainers import BOTH, STAGES, TP, arguments, assert_same_history, data, history, model, stock
from test_accelerator import assert_near, loop, reset, whole
from typer.testing import CliRunner

import tpcore
from tpcore import Mesh
from tpcore.cli.app import app
from tpcore_nxd import optimum_neuron as neuron

COMMON = [
    *("--max_steps=4", "--logging_steps=1", "--learning_rate=1e-2", "--max_grad_norm=0.5"),
    *("--report_to=none", "--disable_tqdm=True", "--include_num_input_tokens_seen=true"),
]


def sizes(train: int, evaluation: int) -> list[str]:
    return [f"--per_device_train_batch_size={train}", f"--per_device_eval_batch_size={evaluation}"]


def script(ctx: tpcore.ParallelContext, files: Path, out: Path, flags: list[str]) -> Any:
    """The guide's script in short."""
    parser = neuron.NeuronHfArgumentParser(neuron.NeuronTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses([f"--output_dir={out}", *COMMON, *flags])
    with neuron.lazy_load_for_parallelism(args.tensor_parallel_size, args.pipeline_parallel_size):
        made = transformers.AutoModelForCausalLM.from_pretrained(files)
    trainer = neuron.NeuronTrainer(made, args, **data())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    trainer.save_model()
    tpcore.checkpoint.wait()
    return history(trainer), made.get_input_embeddings().weight.shape[0]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("files")
    model().save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return history(stock(tmp_path_factory.mktemp("whole")))


ALL = "--async_save --disable_embedding_parallelization --disable_sequence_parallel --zero_1 "
ALL += "--optimizer_use_master_weights --optimizer_use_fp32_grad_acc"


@pytest.mark.parametrize(
    ("mesh", "batches", "flags", "rows"),
    [
        (TP, (4, 4), "--zero_1", 50),
        (BOTH, (2, 2), ALL, 99),
        (STAGES, (2, 4), "--gradient_accumulation_steps=2 --pipeline_parallel_size=2", 25),
    ],
    ids=["tp zero1", "dp tp all flags", "pp tp"],
)
def test_the_guides_flow(
    pool: RankPool, files: Path, want: Any, tmp_path: Path, mesh: Mesh, batches: Any, flags: str, rows: int
) -> None:
    """Trained, saved in parts, consolidated by the command, opened by transformers."""
    words = [*flags.split(), "--tensor_parallel_size=2", "--save_strategy=steps", "--save_steps=2", *sizes(*batches)]
    for got, table in pool.run(mesh, script, files, tmp_path / "out", words):
        assert_same_history(got, want)
        assert table == rows
    assert not [*(tmp_path / "out").rglob("*.safetensors.index.json")]
    assert not (tmp_path / "out" / "checkpoint-4" / "model.safetensors").exists()
    words = ["checkpoint", "consolidate", f"{tmp_path}/out/checkpoint-4", f"{tmp_path}/one", "-f", "safetensors"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    neuron.consolidate_model_parallel_checkpoints_to_unified_checkpoint(
        tmp_path / "out" / "tensor_parallel_shards", tmp_path / "two", "pytorch"
    )
    assert (tmp_path / "two" / "pytorch_model.bin").is_file()
    for where in ("one", "two"):
        made = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / where)
        trainer = transformers.Trainer(made, arguments(tmp_path / "again"), **data())
        assert trainer.evaluate()["eval_loss"] == pytest.approx(want[-1]["eval_loss"], rel=1e-5)  # float32


def test_resumes_on_another_mesh(pool: RankPool, files: Path, want: Any, tmp_path: Path) -> None:
    common = ["--tensor_parallel_size=2", "--zero_1"]
    pool.run(TP, script, files, tmp_path / "a", [*common, *sizes(4, 4), "--save_strategy=steps", "--save_steps=2"])
    again = [f"--resume_from_checkpoint={tmp_path / 'a' / 'checkpoint-2'}"]
    for got, _ in pool.run(BOTH, script, files, tmp_path / "b", [*common, *sizes(2, 2), *again]):
        assert_same_history(got, want)


def _loop(ctx: tpcore.ParallelContext) -> list[float]:
    reset()
    plugin = neuron.ModelParallelismPlugin(2, sequence_parallel_enabled=True)
    accelerator = neuron.NeuronAccelerator(mp_plugin=plugin, zero_1=True, cpu=True, gradient_accumulation_steps=2)
    made = model()
    make = neuron.make_optimizer_constructor_lazy(torch.optim.AdamW)
    return loop(accelerator, made, make(made.parameters(), lr=1e-2), None)


def test_a_lazy_optimizer_is_the_class_itself() -> None:
    assert neuron.make_optimizer_constructor_lazy(torch.optim.AdamW) is torch.optim.AdamW
    with pytest.raises(ValueError, match=r"Adagrad makes its state at once.*tpcore\.Zero1"):
        neuron.make_optimizer_constructor_lazy(torch.optim.Adagrad)


def test_an_accelerator_cuts_what_it_prepares(pool: RankPool) -> None:
    expected = whole()
    for got in pool.run(BOTH, _loop):
        assert_near(got, expected)


def _said(ctx: tpcore.ParallelContext, out: Path) -> None:
    make = partial(neuron.NeuronTrainingArguments, output_dir=str(out), use_cpu=True)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4 .* has the mesh"):
        make(tensor_parallel_size=4)
    with pytest.raises(ValueError, match="give --zero_1 as well"):
        make(tensor_parallel_size=2, optimizer_use_master_weights=True)
    with pytest.raises(ValueError, match=r"virtual_pipeline_parallel_size=2.*leave it out"):
        neuron.TrainingNeuronConfig(tensor_parallel_size=2, virtual_pipeline_parallel_size=2)
    with pytest.raises(TypeError, match="takes NeuronTrainingArguments"):
        neuron.NeuronTrainer(model(), arguments(out))
    args = make(tensor_parallel_size=2)
    assert args.mp_plugin.sequence_parallel_enabled
    assert args.trn_config == neuron.TrainingNeuronConfig(2, True), "fields by position, as published"
    assert args.mp_plugin == neuron.ModelParallelismPlugin(2, True, True), "fields by position, as published"
    assert args.trn_config.should_parallelize
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):  # the second before 5.23
        cut, asked = tpcore.ColumnParallelLinear(4, 8), list[str]()
        setattr(cut, name, partial(asked.append, name))
        neuron.ModelParallelismPlugin(2, gradient_checkpointing=True).parallelize_model(cut)
        assert asked == [name]
    assert not args.zero1_options
    both = {"master_dtype": torch.float32, "grad_dtype": torch.float32}
    wide = partial(make, tensor_parallel_size=2, zero_1=True)
    assert wide(bf16=True).zero1_options == both, "as in current releases"
    neither = {"optimizer_use_master_weights": False, "optimizer_use_fp32_grad_acc": False}
    assert wide().zero1_options == wide(bf16=True, **neither).zero1_options == {}
    ratio = make(tensor_parallel_size=2, warmup_ratio=0.25)
    assert ratio.get_warmup_steps(8) == make(tensor_parallel_size=2, **_given(ratio)).get_warmup_steps(8) == 2


def _given(args: Any) -> dict[str, Any]:
    """What scripts hand on of ``to_dict()``."""
    return {name: args.to_dict()[name] for name in ("warmup_steps", "warmup_ratio")}


def _seq2seq() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def _translate(kind: Any, args: Any) -> list[dict[str, float]]:
    def right(found: transformers.EvalPrediction) -> dict[str, float]:
        return {"right": float((found.predictions == found.label_ids[:, : found.predictions.shape[1]]).mean())}

    trainer = kind(model=_seq2seq(), args=args, **{**data(), "compute_metrics": right})
    trainer.train()
    trainer.evaluate()
    # generated tokens; padded to the longest of all
    said = trainer.predict(data()["eval_dataset"]).predictions
    return [*history(trainer), {"tokens": said.tolist()}]


def _flags(size: int) -> list[str]:
    return [*COMMON, *sizes(size, size), "--save_strategy=no", "--predict_with_generate", "--generation_max_length=6"]


def _translated(ctx: tpcore.ParallelContext, out: Path) -> list[dict[str, float]]:
    parser = neuron.NeuronHfArgumentParser(neuron.Seq2SeqNeuronTrainingArguments)
    words = [f"--output_dir={out}", "--tensor_parallel_size=2", "--zero_1", *_flags(2)]
    (args,) = parser.parse_args_into_dataclasses(words)
    assert not args.overwrite_output_dir
    return _translate(neuron.Seq2SeqNeuronTrainer, args)


def test_a_seq2seq_trainer_is_the_stock_one(pool: RankPool, tmp_path: Path) -> None:
    """Losses, and the tokens that it generates to evaluate."""
    parser = transformers.HfArgumentParser(transformers.Seq2SeqTrainingArguments)
    words = [f"--output_dir={tmp_path}", "--use_cpu", *_flags(4)]
    (args,) = parser.parse_args_into_dataclasses(words)
    *want, tokens = _translate(transformers.Seq2SeqTrainer, args)
    for got in pool.run(BOTH, _translated, tmp_path):
        assert_same_history(got[:-1], want)
        assert got[-1] == tokens


def _in_bfloat16(ctx: tpcore.ParallelContext, out: Path) -> None:
    args = neuron.NeuronTrainingArguments(output_dir=str(out), tensor_parallel_size=2, bf16=True)
    assert args.use_cpu
    with pytest.raises(TypeError, match="Seq2SeqNeuronTrainer takes Seq2SeqNeuronTrainingArguments"):
        neuron.Seq2SeqNeuronTrainer(_seq2seq(), args)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    assert neuron.NeuronTrainer(model=model(), args=args, tokenizer=tokenizer).processing_class is tokenizer
    neuron.send_example_telemetry("run_clm", args, framework="pytorch")
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        neuron.NeuronTrainer(model=model().to(torch.bfloat16), args=args)
    assert ("--zero_1" in heard.getvalue()) == (ctx.rank == 0)


@pytest.mark.parametrize("check", [_said, _in_bfloat16], ids=["what does not fit", "of transformers 4, in bfloat16"])
def test_arguments_of_scripts(pool: RankPool, tmp_path: Path, check: Any) -> None:
    pool.run(TP, check, tmp_path)


def _notes(ctx: tpcore.ParallelContext, out: Path) -> str:
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        options: dict[str, Any] = {"kv_size_multiplier": 2, "num_local_ranks_per_step": 2, "use_xser": False}
        options |= {"half_precision_backend": "amp", "neuron_cc_optlevel": "2", "skip_cache_push": True}
        options |= {"stochastic_rounding_enabled": True, "optimizer_save_master_weights_in_ckpt": True}
        neuron.NeuronTrainingArguments(output_dir=str(out), use_cpu=True, tensor_parallel_size=2, **options)
        neuron.TrainingNeuronConfig(2, fuse_qkv=True, recompute_causal_mask=False, transpose_nki_inputs=False)
        reset()
        neuron.NeuronAccelerator(mp_plugin=neuron.ModelParallelismPlugin(2), autocast_backend="amp", cpu=True)
    return heard.getvalue()


def test_every_option_that_needs_nothing_says_why(pool: RankPool, tmp_path: Path) -> None:
    from tpcore_nxd.optimum_neuron.options import NOTES

    first, second = pool.run(TP, _notes, tmp_path)
    lines = [line for line in first.splitlines() if "needs nothing here" in line]
    assert {line.removeprefix("tpcore: ").partition("=")[0] for line in lines} == set(NOTES)
    assert len(lines) == len(NOTES)
    assert "needs nothing" not in second


def _managed(ctx: tpcore.ParallelContext) -> None:
    manager = neuron.ParallelizersManager
    assert manager.is_model_supported("bert")
    for kind in ("bert", "roberta", "gpt_neo", "gpt_neox", "llama", "mistral", "t5"):  # optimum-neuron's
        assert manager.is_model_supported(kind), kind
        assert manager.parallelizer_for_model(kind).model_type == kind
    for kind in ("mamba", "llama4", "no such"):
        assert not manager.is_model_supported(kind), kind
    with pytest.raises(ValueError, match="mamba has no plan in transformers and is not among"):
        manager.parallelizer_for_model("mamba")
    made = model()
    assert manager.is_model_supported(made)
    assert not manager.is_model_supported(torch.nn.Linear(2, 2))
    parallelizer = manager.parallelizer_for_model(made)
    with pytest.raises(ValueError, match="for bert was given a llama"):
        manager.parallelizer_for_model("bert").parallelize(made)
    assert parallelizer.parallelize(made, parallelize_embeddings=False) is made
    assert made.lm_head.weight.shape == (99, 32)
    assert made.model.layers[0].mlp.gate_proj.weight.shape == (32, 32)


def test_parallelizers(pool: RankPool) -> None:
    pool.run(TP, _managed)
