"""``tpcore_hf.trainer.Trainer``: as the stock Trainer in one process, on every mesh."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import signal
from argparse import Namespace
from contextvars import Context
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.rank_pool import RankPool
from helpers.trainers import (
    BOTH,
    CONTEXT,
    STAGES,
    TP,
    arguments,
    assert_same_history,
    assert_same_weights,
    data,
    examples,
    history,
    model,
    on_mesh,
    stock,
)
from test_dropout_masks import Recorder

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.testing import ThreadBackend
from tpcore.testing.threads import ThreadWorld
from tpcore_hf.accelerate import Accelerator
from tpcore_hf.shard.figures import parameter_count
from tpcore_hf.trainer import Trainer, check_arguments

CONTEXT_STAGES = Mesh({"pp": 2, "dp": 1, "cp": 2, "tp": 1})
HALF = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
GROUPED = {"max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "group_by_length"}
"""22 examples by 4: the last batch has 2. Torch draws the order of each epoch."""

TRAINER = {
    "create_accelerator_and_postprocess": [],
    "get_train_dataloader": [],
    "get_total_train_batch_size": ["args"],
    "get_tp_size": [],
    "train": ["resume_from_checkpoint", "trial", "ignore_keys_for_eval"],
    "store_flos": [],
    "get_num_trainable_parameters": [],
    "_move_model_to_device": ["model", "device"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "create_optimizer": ["model"],
    "save_model": ["output_dir", "_internal_call"],
    "_save": ["output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_load_best_model": [],
    "_load_rng_state": ["checkpoint"],
}


def test_what_is_overridden_is_there_and_listed() -> None:
    for name, names in TRAINER.items():
        for cls in (transformers.Trainer, Trainer):
            assert [*inspect.signature(getattr(cls, name)).parameters] == ["self", *names], name
    for module in (transformers.trainer, transformers.trainer_pt_utils):
        assert module.get_model_param_count is parameter_count
    own = {name for name in vars(Trainer) if hasattr(transformers.Trainer, name) and not name.startswith("__")}
    assert own == set(TRAINER)


@pytest.mark.parametrize(
    ("mesh", "cut", "zero1", "here", "both"),
    [
        (TP, {"sequence_parallel": True}, True, {}, {"gradient_accumulation_steps": 2}),
        (TP, {}, False, {}, {"label_smoothing_factor": 0.1, "optim": "sgd", "max_grad_norm": 0.0}),
        (BOTH, {"sequence_parallel": True}, {"bucket_mb": 1e-3}, HALF, {**GROUPED, "dataloader_drop_last": True}),
        (STAGES, {"num_microbatches": 4}, True, {}, GROUPED),
        (CONTEXT, {"context_parallel": "ring"}, True, HALF, {}),
        pytest.param(
            CONTEXT_STAGES, {"context_parallel": "auto", "num_microbatches": 4}, True, {}, {}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_equals_the_stock_trainer(
    pool: RankPool,
    tmp_path: Path,
    mesh: Mesh,
    cut: dict[str, Any],
    zero1: Any,
    here: dict[str, Any],
    both: dict[str, Any],
) -> None:
    whole = stock(tmp_path / "whole", **both)
    for got, weights in pool.run(mesh, partial(on_mesh, **both, **here), tmp_path / "cut", cut, zero1):
        assert_same_history(got, history(whole))
        assert_same_weights(weights, whole.model.state_dict())


@pytest.mark.slow
def test_bfloat16_stays_close(pool: RankPool, tmp_path: Path) -> None:
    whole = stock(tmp_path / "whole", bf16=True, max_steps=2)
    got, _ = pool.run(TP, partial(on_mesh, bf16=True, max_steps=2), tmp_path / "cut", {}, True)[0]
    # 8 bits of mantissa: sums in parts round elsewhere; right guesses of an untrained model are chance
    losses = [[e.get("loss", e.get("eval_loss")) for e in entries] for entries in (got, history(whole))]
    assert [x is None for x in losses[0]] == [x is None for x in losses[1]]
    for one, other in zip(*losses, strict=True):
        assert one is None or abs(one - other) < 0.02
    # so close to float32 that nothing would show: autocast is on
    assert got != history(stock(tmp_path / "float32", max_steps=2))


def _masks(ctx: tpcore.ParallelContext, where: Path) -> list[list[bool]]:
    """Of two steps in which each attention drops half of its weights."""
    cut = tpcore.parallelize(model(attention_dropout=0.5, attn_implementation="eager"))
    options: Any = {**HALF, "max_steps": 2, "per_device_train_batch_size": 2}
    trainer = Trainer(cut, arguments(where, **options), train_dataset=examples(8))
    with Recorder() as recorder:
        trainer.train()
    return [kept.flatten().tolist() for _, _, kept in recorder.masks] + [torch.rand(4).tolist()]


@pytest.mark.slow
def test_no_two_ranks_and_no_two_steps_drop_the_same(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(BOTH, _masks, tmp_path)
    every = [tuple(mask) for *masks, _ in ranks for mask in masks]
    assert len(set(every)) == len(every) == 4 * 2 * 2  # ranks, steps, layers
    assert len({tuple(after) for *_, after in ranks}) == 1  # the ranks' common stream goes on alike


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return cycle(examples(2))


def _bits(where: Path, tp: int) -> tuple[list[float], dict[str, bytes]]:
    """Norms and weights after 2 steps of 8 microbatches and one of 4, on all dp ranks together, with dropout of what is
    whole."""
    ctx = tpcore.init("cpu_gloo", tp=tp, reproducible=4)
    dp = ctx.batch.size
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 8, "attn_pdrop": 0.0}
    cut = tpcore.parallelize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    each = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // dp}
    options = arguments(where, **each | {"max_steps": -1, "num_train_epochs": 1})
    trainer = Trainer(cut, options, train_dataset=examples(20))
    trainer.train()
    if dp == 2:
        split = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 2}
        more: dict[str, Any]
        for more, given, message in (
            ({}, Endless(), "2 dp ranks would have other batches than one: take a dataset with a length"),
            (split, examples(8), "without split_batches"),
            ({}, examples(21), "21 examples are no whole number of batches of 1 for 2 dp ranks.*: take 20"),
        ):
            with pytest.raises(ValueError, match=message):
                Trainer(cut, arguments(where, **each | more), train_dataset=given).train()
        with pytest.raises(
            ValueError, match=r"gradient_accumulation_steps=4 are added in runs: take 1 here, or tpcore_hf"
        ):
            Accelerator(cpu=True, gradient_accumulation_steps=4).prepare(torch.utils.data.DataLoader(examples(8)))
    weights = {name: t.detach().numpy().tobytes() for name, t in tpcore_hf.full_state_dict(cut).items()}
    tpcore.shutdown()
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry], weights


def _bits_alone(ctx: tpcore.ParallelContext, where: Path) -> Any:
    return Context().run(_bits, where, ctx.mesh.axes["tp"])


def test_has_the_same_bits_on_every_mesh(pool: RankPool, tmp_path: Path) -> None:
    want = pool.run(Mesh({"dp": 1, "tp": 1}), _bits_alone, tmp_path)[0]
    assert len(want[0]) == 3
    for mesh in (BOTH, Mesh({"dp": 4, "tp": 1})):
        assert pool.run(mesh, _bits_alone, tmp_path) == [want] * 4


SAVING = {"save_strategy": "steps", "save_steps": 2}


def test_resumes_on_another_mesh(pool: RankPool, tmp_path: Path) -> None:
    whole = stock(tmp_path / "whole", **SAVING)
    pool.run(TP, partial(on_mesh, **SAVING), tmp_path / "tp", {"sequence_parallel": True}, True)
    first = str(tmp_path / "tp" / "checkpoint-2")
    for mesh, cut in ((TP, {}), (BOTH, {}), (STAGES, {"num_microbatches": 2})):
        here = HALF if mesh is BOTH else {}
        for got, weights in pool.run(mesh, partial(on_mesh, **here), tmp_path / "next", cut, True, first):
            assert_same_history(got, history(whole))
            assert_same_weights(weights, whole.model.state_dict())
    # from where the stock Trainer stopped
    (tmp_path / "stock").mkdir()
    stocks = str(tmp_path / "whole" / "checkpoint-2")
    for got, _ in pool.run(TP, on_mesh, tmp_path / "stock", {}, True, stocks):
        assert_same_history(got, history(whole))


class Preempts(transformers.TrainerCallback):
    """Sends this rank its scheduler's signal in the middle of the second step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _preempted(where: Path) -> None:
    ctx = tpcore.init(backend="cpu_gloo", tp=2)
    options = arguments(where, enable_jit_checkpoint=True)
    trainer = Trainer(tpcore.parallelize(model()), options, **data(), callbacks=[Preempts()] * ctx.rank)
    assert options.enable_jit_checkpoint
    trainer.train()
    raise AssertionError("trained to the end")


class Fails(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        raise ArithmeticError


def test_after_an_error_a_signal_ends_the_process_as_before(tmp_path: Path) -> None:
    tpcore.init(ThreadBackend(0, ThreadWorld(1)))
    try:
        options = arguments(tmp_path, enable_jit_checkpoint=True)
        trainer = Trainer(tpcore.parallelize(model()), options, **data(), callbacks=[Fails()])
        with pytest.raises(ArithmeticError):
            trainer.train()
    finally:
        tpcore.shutdown()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
@pytest.mark.processes
def test_a_signal_to_one_rank_makes_a_checkpoint_of_all(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank \d called sys.exit\(143\)"):
        tpcore.launch(_preempted, 2, args=(tmp_path / "ended",))
    first = tmp_path / "ended" / "checkpoint-2"
    assert [*first.parent.iterdir()] == [first]
    want = history(stock(tmp_path / "whole"))
    for got, _ in pool.run(BOTH, partial(on_mesh, **HALF), tmp_path / "next", {}, False, str(first)):
        assert_same_history(got, want)


def adapted(how: str) -> Any:
    """A model with adapters, added before ``parallelize``, after it, or without it."""
    import peft

    from tpcore_hf.peft import get_peft_model

    base = tpcore.parallelize(model()) if how == "after" else model()
    torch.manual_seed(4)
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="gaussian")
    if how == "after":
        return get_peft_model(base, options)
    found = peft.get_peft_model(base, options)
    return tpcore.parallelize(found) if how == "before" else found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", ["after", "before"])
def test_adapters_and_their_files(pool: RankPool, how: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    want = history(stock(tmp_path / "stock", partial(adapted, "")))
    for got, _ in pool.run(TP, partial(on_mesh, **SAVING), tmp_path / how, partial(adapted, how)):
        assert_same_history(got, want)
    last = tmp_path / how / "checkpoint-2"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {f.name for f in last.iterdir()}
    assert not list(last.glob("model*"))  # the base model is not trained, and not written
    opened = peft.PeftModel.from_pretrained(model(), last)
    assert any("lora_" in name for name, _ in opened.named_parameters())
    again = tmp_path / how, partial(adapted, how), True, str(last)
    for got, _ in pool.run(Mesh({"pp": 1, "dp": 2, "tp": 1}), partial(on_mesh, **SAVING, **HALF), *again):
        assert_same_history(got, want)


def _best(ctx: tpcore.ParallelContext, where: Path, cut: Any, options: Any) -> Any:
    made = tpcore.parallelize(model(), **cut)
    bars = io.StringIO()
    with contextlib.redirect_stdout(bars), contextlib.redirect_stderr(bars):
        trainer = Trainer(made, arguments(where, **options), **data())
        trainer.train()
        trainer.save_model(str(where / "last"))
        best = trainer.evaluate()["eval_loss"]
    return trainer.state.best_metric, best, "it/s" in bars.getvalue()


@pytest.mark.parametrize("only", [False, True], ids=["", "only the model"])
def test_ends_with_the_best_model(pool: RankPool, tmp_path: Path, only: bool) -> None:
    """Under a learning rate that destroys it: the best is the first. Bars are shown by rank 0 alone."""
    options = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "save_only_model": only, "save_total_limit": 1}
    options |= {"learning_rate": 0.5, "max_steps": 3, "disable_tqdm": False}
    mesh, cut = (STAGES, {"num_microbatches": 2}) if only else (TP, {})
    found = pool.run(mesh, _best, tmp_path, cut, options)
    best, reached, _ = found[0]
    assert reached == pytest.approx(best, rel=1e-5)  # float32
    assert [shown for *_, shown in found] == [True] + [False] * (mesh.size - 1)
    (kept,) = tmp_path.glob("checkpoint-*")
    assert (kept / "optimizer_shards").is_dir() is not only
    # as one process opens it
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    again = transformers.Trainer(whole, arguments(tmp_path / "again"), **data()).evaluate()["eval_loss"]
    assert again == pytest.approx(best, rel=1e-5)


def _raise(error: Exception) -> None:
    raise error


def _failed_save(ctx: tpcore.ParallelContext, where: Path) -> None:
    layer = tpcore.ColumnParallelLinear(4, 8)
    trainer = Trainer(layer, arguments(where))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.Trainer, "save_model", lambda *_: _raise(OSError("full")))
        with pytest.raises(OSError, match="full"):
            trainer.save_model()
    assert trainer._whole is None


def test_a_save_that_fails_keeps_no_copy_of_the_model(pool: RankPool, tmp_path: Path) -> None:
    pool.run(TP, _failed_save, tmp_path)


def _refused(ctx: tpcore.ParallelContext, where: Path) -> None:
    import accelerate

    whole = model()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is whole on every rank .* tpcore.parallelize"):
        Trainer(whole, arguments(where), **data())
    made = tpcore.parallelize(whole)
    stocks = transformers.Trainer(made, arguments(where), **data())
    for call in (stocks.train, stocks.evaluate, stocks.predict):
        with pytest.raises(ValueError, match=r"sharded over ranks, and accelerate.*use Trainer of tpcore"):
            call(*[stocks.eval_dataset] if call == stocks.predict else [])
    with pytest.raises(ValueError, match="sharded over ranks, and accelerate"):
        accelerate.Accelerator(cpu=True).prepare(made)
    with pytest.raises(ValueError, match=r"train_sampling_strategy='batch_rebalance'.*all ranks"):
        Trainer(made, arguments(where, train_sampling_strategy="batch_rebalance"), **data())
    with pytest.raises(ValueError, match=r"fsdp=.*two libraries would cut one model"):
        Trainer(made, arguments(where, fsdp=True), **data())
    with pytest.raises(ValueError, match=r"deepspeed='ds\.json'.*two libraries would cut one model"):
        check_arguments(Namespace(deepspeed="ds.json"))  # transformers' own wants deepspeed installed
    trainer = Trainer(made, arguments(where, optim="adafactor"), **data(), zero1=True)
    with pytest.raises(ValueError, match="Adafactor"):
        trainer.create_optimizer()
    with pytest.raises(ValueError, match=r"sharded over tp, and Adafactor mixes"):
        on_mesh(ctx, where, {}, optim="adafactor")
    with pytest.raises(ValueError, match=r"mixed_precision='fp16'.*use bf16"):
        Trainer(tpcore.parallelize(model()), arguments(where, fp16=True), **data())
    taken = r"mesh='auto' divides the job and cuts the model, and they are already, on \{'pp': 1, 'dp': 1, 'tp': 2\}"
    with pytest.raises(ValueError, match=taken):
        Trainer(model=made, args=arguments(where), mesh="auto")


def test_what_would_train_half_a_model_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(TP, _refused, tmp_path)
    with pytest.raises(ValueError, match=r"mesh must be 'auto' or a dict of options of tpcore\.plan, not 'best'"):
        Trainer(model=model(), args=arguments(tmp_path), mesh="best")


def auto(ctx: tpcore.ParallelContext, where: Path) -> tuple[dict[str, int], list[float], int]:
    """The mesh that a Trainer chooses, its losses, and the examples of a rank; in a job that the script has joined."""
    return Context().run(_auto, where)


def _auto(where: Path) -> tuple[dict[str, int], list[float], int]:
    tpcore.init("cpu_gloo")
    options = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 1e-3}
    trainer = Trainer(model=model(), args=arguments(where, **options), train_dataset=examples(24), mesh=AUTO_OPTIONS)
    trainer.train()
    axes = dict(tpcore.current().mesh.axes)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    tpcore.shutdown()
    return axes, losses, trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps


AUTO_OPTIONS = {"machine": "cpu", "seq_len": 8}


@pytest.mark.slow
def test_chooses_its_mesh(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(TP, auto, tmp_path)
    reference = transformers.Trainer(
        model=model(),
        args=arguments(tmp_path, per_device_train_batch_size=8, max_steps=3, learning_rate=1e-3),
        train_dataset=examples(24),
    )
    reference.train()
    alone = [entry["loss"] for entry in reference.state.log_history if "loss" in entry]
    for axes, losses, rows in found:
        assert axes["tp"] * axes["pp"] * axes["dp"] * axes.get("cp", 1) == 2
        assert rows * axes["dp"] == 8  # a step's examples are what they were
        assert losses == pytest.approx(alone, rel=1e-4)  # the log is rounded
