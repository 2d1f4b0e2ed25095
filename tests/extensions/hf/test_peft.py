"""LoRA adapters of peft on sharded models, against peft on the whole: loss, gradients, files, merging."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import families
from helpers.hf import GPT2, NO_DROPOUT, TINY, double, llama, part, text
from helpers.hf import recompute as activation_checkpointing
from helpers.tiers import tiers
from helpers.worlds import each_rank
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import tpcore
from tpcore.cli.app import app
from tpcore.layers.sharding import sharding
from tpcore.layout.mesh import Mesh
from tpcore.testing import run_ranks
from tpcore_hf.load.gathered import whole as unsharded

peft = pytest.importorskip("peft")

from tpcore_hf.model_files import load_model  # noqa: E402  after the skip
from tpcore_hf.peft import from_pretrained, get_peft_model  # noqa: E402

pytestmark = [
    # peft asks transformers by a name that it has given up
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),  # GPT-2, without harm
]
TWO = Mesh({"tp": 2})
EXACT = 1e-11  # float64: another order of summation; a float32 step of a norm or a router, weighted, is as large


def of(name: str, **options: Any) -> nn.Module:
    kind: Any = getattr(transformers, name)
    return kind(kind.config_class(**options))


EXPERTS: dict[str, Any] = {**TINY, "num_key_value_heads": 4, "num_local_experts": 4, "experts_implementation": "eager"}
MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "llama": (llama, "all-linear"),
    "qwen2": (partial(of, "Qwen2ForCausalLM", **TINY, num_key_value_heads=2), "all-linear"),
    "gpt2": (partial(of, "GPT2LMHeadModel", **GPT2), ["c_attn", "c_proj", "c_fc"]),
    "mixtral": (partial(of, "MixtralForCausalLM", **EXPERTS), ["q_proj", "k_proj", "v_proj", "o_proj"]),
    "bert": (partial(of, "BertForMaskedLM", **TINY, **NO_DROPOUT), ["query", "key", "value", "dense"]),
}


def config(targets: Any = "all-linear", **options: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return double(make).train()


@torch.no_grad()
def warm(model: nn.Module) -> None:
    """Other values than the zeros of peft's B, without which A's gradient is zero too."""
    numbers = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_" in name and not name.endswith("lora_A.default.weight"):
            found = sharding(p)
            shape = p.shape if found is None else found.layout.shape
            p.copy_(part(torch.randn(shape, generator=numbers, dtype=p.dtype) / 10, p))


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and whole gradients by name."""
    batch = text()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_step(model: Any, loss: Tensor, whole: dict[str, Tensor], rtol: float = 0, atol: float = EXACT) -> None:
    """A step of ``model`` has the loss and this rank's parts of the gradients."""
    got, grads = step(model)
    torch.testing.assert_close(got, loss, rtol=rtol, atol=atol)
    assert grads.keys() == whole.keys()
    for name, p in model.named_parameters():
        if name in whole:
            torch.testing.assert_close(grads[name], part(whole[name], p), rtol=10 * rtol, atol=atol)


def adapted(make: Callable[[], nn.Module], how: str, options: dict[str, Any], **cuts: Any) -> Any:
    """With adapters added before ``parallelize``, after it, or without it."""
    torch.manual_seed(7)
    model = made(make)
    torch.manual_seed(8)
    if how == "before":
        whole = peft.get_peft_model(model, config(**options))
        before = list(whole.parameters())
        tpcore.parallelize(whole, **cuts)
        # an optimizer that has them goes on working
        assert all(a is b for a, b in zip(before, whole.parameters(), strict=True))
        return whole
    if how == "after":
        return get_peft_model(tpcore.parallelize(model, **cuts), config(**options))
    return peft.get_peft_model(model, config(**options))


GAUSSIAN = {"init_lora_weights": "gaussian"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {"targets": targets, **GAUSSIAN}, {}) for name, (_, targets) in MODELS.items()},
    "all biases": ("qwen2", {"use_rslora": True, "bias": "all"}, {}),
    "biases of its own": ("qwen2", {"lora_bias": True, "targets": ["q_proj", "k_proj", "v_proj"]}, {}),
    "of the embedding": ("llama", {"targets": ["q_proj", "o_proj", "embed_tokens"]}, {}),
    "beside an embedding": ("llama", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]}, {}),
    "beside a norm": ("llama", {"targets": ["q_proj"], "modules_to_save": ["norm"]}, {}),
    "sequence parallel": ("llama", {}, {"sequence_parallel": True}),
    "sequence parallel beside all norms and a row layer": (
        "llama",
        {"targets": ["q_proj"], "modules_to_save": ["norm", "down_proj"]},
        {"sequence_parallel": True},
    ),
}
QUICK = [(case, 4 if case == "sequence parallel" else 2) for case in CASES.keys() - {"qwen2", "mixtral", "bert"}]


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize(("case", "tp"), tiers(sorted(QUICK), slow=[(name, 4) for name in MODELS]))
def test_losses_and_gradients(case: str, tp: int, how: str) -> None:
    name, options, cuts = CASES[case]
    whole = adapted(MODELS[name][0], "", options)
    initial = {n: p.detach().clone() for n, p in whole.named_parameters()}
    warm(whole)
    loss, gradients = step(whole)

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = adapted(MODELS[name][0], how, options, **cuts)
        assert {n for n, p in model.named_parameters() if p.requires_grad} == gradients.keys()
        for key, p in model.named_parameters():
            assert torch.equal(p, part(initial[key], p)), key
        warm(model)
        assert_step(model, loss, gradients)

    run_ranks(Mesh({"tp": tp}), rank)


def test_layers_that_gather_tokens_themselves() -> None:
    """As a model has them that is written with sharded layers, without ``parallelize``."""

    def check(ctx: tpcore.ParallelContext) -> list[Tensor]:
        torch.manual_seed(0)
        options: dict[str, Any] = {"bias": False, "dtype": torch.float64, "sequence_dim": 0}
        up = tpcore.ColumnParallelLinear(6, 8, gather_output=False, **options)
        down = tpcore.RowParallelLinear(8, 6, input_is_parallel=True, **options)
        config = peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights="gaussian")
        model = get_peft_model(nn.Sequential(up, nn.GELU(), down), config)
        x = torch.arange(24, dtype=torch.float64).sin().view(4, 6)
        mine = ctx.comm("tp").split(x, 0)
        for _, layer in model.named_modules():
            for b in getattr(layer, "lora_B", {}).values():
                nn.init.constant_(b.weight, 0.1)
        out = model(mine)
        out.square().sum().backward()
        return [ctx.comm("tp").all_gather(out, 0), *(p.grad for n, p in model.named_parameters() if "lora_" in n)]

    (want,) = run_ranks(Mesh({"tp": 1}), check)
    for got in run_ranks(TWO, check):
        for mine, whole in zip(got, want, strict=True):
            if mine.shape == whole.shape:
                torch.testing.assert_close(mine, whole, rtol=EXACT, atol=EXACT)
        assert [t.shape == w.shape for t, w in zip(got, want, strict=True)] == [True, True, False, False, True]


def test_files_open_on_one_process_and_on_any_mesh(tmp_path: Path) -> None:
    whole = adapted(llama, "", {})
    warm(whole)
    whole.eval()
    with torch.no_grad():
        want = whole(**text()).logits

    def save(ctx: tpcore.ParallelContext) -> None:
        model = adapted(llama, "after" if ctx.mesh.size == 2 else "before", {})
        warm(model)
        model.save_pretrained(tmp_path / str(ctx.mesh.size))

    def opened(ctx: tpcore.ParallelContext, folder: Path) -> None:
        trained = from_pretrained(tpcore.parallelize(made(llama)), folder.parent, "other", True, subfolder=folder.name)
        assert all(p.requires_grad == ("lora_" in n) for n, p in trained.named_parameters())
        late = from_pretrained(tpcore.parallelize(made(llama)), folder)
        early = tpcore.parallelize(peft.PeftModel.from_pretrained(made(llama), folder))
        for model in (late, early):
            assert not any(p.requires_grad for p in model.parameters())
            with torch.no_grad():
                assert (model.eval()(**text()).logits - want).abs().max() < EXACT

    for size in (2, 4):
        run_ranks(Mesh({"tp": size}), save)
        folder = tmp_path / str(size)
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {f.name for f in folder.iterdir()}
        one = peft.PeftModel.from_pretrained(made(llama), folder).eval()
        for name, p in one.named_parameters():
            assert torch.equal(p, whole.get_parameter(name)), name
        run_ranks(Mesh({"tp": 6 - size}), partial(opened, folder=folder))


def test_files_have_the_vocabularys_tables_where_asked_for(tmp_path: Path) -> None:
    def save(name: str, model: Any) -> None:
        with torch.no_grad():  # they are other ones than the base model's, as after resize_token_embeddings
            for table in (model.get_input_embeddings(), model.get_output_embeddings()):
                table.weight.mul_(2)
        model.save_pretrained(tmp_path / name, save_embedding_layers=True)

    def warmed() -> Any:
        model = adapted(llama, "", {})
        warm(model)
        return model

    save("one", warmed())
    run_ranks(TWO, lambda _: save("tp", tpcore.parallelize(warmed())))
    mesh = Mesh({"pp": 2, "dp": 1, "tp": 2})
    run_ranks(mesh, lambda _: save("pp", tpcore.parallelize(warmed(), num_microbatches=2)))
    want, *got = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "tp", "pp"))
    for state in got:
        assert state.keys() == want.keys()
        assert [name for name in want if not torch.equal(state[name], want[name])] == []
    opened = peft.PeftModel.from_pretrained(made(llama), tmp_path / "tp").state_dict()
    names = "base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"
    assert all(torch.equal(opened[name], want[name]) for name in names)

    def on_a_mesh(_: tpcore.ParallelContext) -> None:
        model = from_pretrained(tpcore.parallelize(made(llama)), tmp_path / "tp")
        assert all(torch.equal(unsharded(model.get_parameter(name)), want[name]) for name in names)
        model.load_adapter(tmp_path / "one", "second")

    run_ranks(Mesh({"tp": 4}), on_a_mesh)


@pytest.mark.parametrize("options", [{}, {"targets": ["embed_tokens", "q_proj"], "modules_to_save": ["down_proj"]}])
def test_a_checkpoint_consolidates_to_the_files_of_save_pretrained(tmp_path: Path, options: dict[str, Any]) -> None:
    def rank(_: tpcore.ParallelContext) -> None:
        model = adapted(llama, "after", options)
        warm(model)
        tpcore.checkpoint.save({"model": model.state_dict()}, tmp_path / "run")
        model.save_pretrained(tmp_path / "files", save_embedding_layers=False)

    run_ranks(TWO, rank)
    files = str(tmp_path / "files")
    command = ["checkpoint", "consolidate", str(tmp_path / "run"), str(tmp_path / "out"), "--adapter"]
    done = CliRunner().invoke(app, [*command, files])
    assert done.exit_code == 0, done.output
    got, want = (load_file(tmp_path / where / "adapter_model.safetensors") for where in ("out", "files"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    peft.PeftModel.from_pretrained(made(llama), tmp_path / "out")
    assert "there is no configuration" in CliRunner().invoke(app, [*command, str(tmp_path / "run")]).output


def test_files_with_layers_of_the_model_open_in_a_sharded_one(tmp_path: Path) -> None:
    options = {"targets": ["q_proj"], "modules_to_save": ["up_proj", "down_proj"], "bias": "all"}
    biased = partial(llama, attention_bias=True)
    whole = adapted(biased, "", options)
    warm(whole)
    with torch.no_grad():
        for name, p in whole.named_parameters():
            if "modules_to_save" in name or name.endswith("bias"):
                p.add_(0.1)
        want = whole.eval()(**text()).logits
    whole.save_pretrained(tmp_path / "one")

    def rank(_: tpcore.ParallelContext) -> None:
        model = from_pretrained(tpcore.parallelize(made(biased)), tmp_path / "one")
        with torch.no_grad():
            assert (model.eval()(**text()).logits - want).abs().max() < EXACT

    run_ranks(TWO, rank)


def test_a_training_loads_adapters_of_any_name_and_misses_none(tmp_path: Path) -> None:
    def rank(_: tpcore.ParallelContext) -> None:
        def model(*targets: str) -> Any:
            return get_peft_model(tpcore.parallelize(made(llama)), config(list(targets)), adapter_name="mine")

        saved, again = model("q_proj"), model("q_proj")
        with torch.no_grad():
            for name, p in saved.named_parameters():
                if "lora_" in name:
                    p.fill_(0.5)
        saved.save_pretrained(tmp_path / "named")
        load_model(again, str(tmp_path / "named"))
        pairs = zip(saved.parameters(), again.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        with pytest.raises(tpcore.CheckpointError, match="holds no values for the adapter 'mine'"):
            load_model(model("q_proj", "up_proj"), str(tmp_path / "named"))

    run_ranks(TWO, rank)


def test_some_adapters_of_all_stages_are_saved(tmp_path: Path) -> None:
    def rank(_: tpcore.ParallelContext) -> None:
        whole = adapted(llama, "", {"targets": ["q_proj"]})
        whole.add_adapter("other", config(["q_proj"]))
        model = tpcore.parallelize(whole, num_microbatches=2)
        with pytest.raises(ValueError, match="safe_serialization=False"):
            model.save_pretrained(tmp_path / "bin", safe_serialization=False)
        model.save_pretrained(tmp_path / "one", selected_adapters=["other"])

    run_ranks(Mesh({"pp": 2, "dp": 1, "tp": 1}), rank)
    files = {str(f.relative_to(tmp_path)) for f in tmp_path.rglob("adapter_*")}
    assert files == {"one/other/adapter_config.json", "one/other/adapter_model.safetensors"}
    assert len(load_file(tmp_path / "one/other/adapter_model.safetensors")) == 2 * TINY["num_hidden_layers"]


def test_further_adapters_of_all_layers_and_their_combinations() -> None:
    def both(model: Any) -> Any:
        torch.manual_seed(9)
        model.add_adapter("other", config("All-Linear", init_lora_weights=False))
        model.add_weighted_adapter(["default", "other"], [0.5, 1.5], "sum", "linear")
        model.set_adapter("sum")
        with torch.no_grad():
            return model.double().eval()(**text()).logits

    want = both(adapted(llama, "", {}))

    def rank(_: tpcore.ParallelContext) -> None:
        model = adapted(llama, "after", {})
        assert (both(model) - want).abs().max() < EXACT
        with pytest.raises(ValueError, match=r"'svd'.*each rank has a part"):
            model.add_weighted_adapter(["default", "other"], [0.5, 1.5], "svd")

    run_ranks(TWO, rank)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("name", tiers(["gpt2"], slow=["llama", "bert"]))
def test_merged_weights(name: str, how: str) -> None:
    make, targets = MODELS[name]
    options = {"targets": [*targets, "word_embeddings"] if name == "bert" else targets}
    whole = adapted(make, "", options)
    warm(whole)
    whole.eval()
    with torch.no_grad():
        want, plain = whole(**text()).logits, whole.get_base_model()
        with whole.disable_adapter():
            without = whole(**text()).logits
        whole.merge_adapter()  # of a tied embedding this changes the head too
        merged_in = whole(**text()).logits

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = adapted(make, how, options)
        warm(model)
        model.eval()
        with torch.no_grad():
            with model.disable_adapter():
                assert (model(**text()).logits - without).abs().max() < EXACT
            model.merge_adapter()
            assert (model(**text()).logits - merged_in).abs().max() < EXACT
            model.unmerge_adapter()
            assert (model(**text()).logits - want).abs().max() < EXACT
            merged = model.merge_and_unload()
            assert type(merged) is type(plain)
            assert (merged(**text()).logits - merged_in).abs().max() < EXACT

    run_ranks(TWO, rank)


def test_several_adapters() -> None:
    def both(model: Any, add: Callable[..., None]) -> Any:
        torch.manual_seed(9)
        add("other", config(["q_proj", "down_proj"], init_lora_weights=False))
        model.set_adapter("other")
        return model.double()

    whole = adapted(llama, "", {})
    both(whole, whole.add_adapter)
    loss, gradients = step(whole)

    def rank(ctx: tpcore.ParallelContext) -> None:
        for how in ("before", "after"):
            model = adapted(llama, how, {})
            both(model, model.add_adapter)
            assert_step(model, loss, gradients)
            model.delete_adapter("default")
            model.set_adapter("other")

    run_ranks(TWO, rank)


@pytest.mark.parametrize("how", ["before", "after"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_of_adapters(how: str, sequence_parallel: bool) -> None:
    """Where the input is whole, ranks drop the same elements as one process; where it is sharded, others."""
    options = {"lora_dropout": 0.5, "init_lora_weights": False}
    targets = ["q_proj", "gate_proj"]
    whole = adapted(llama, "", {**options, "targets": targets})
    torch.manual_seed(5)
    loss, gradients = step(whole)

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = adapted(llama, how, {**options, "targets": targets}, sequence_parallel=sequence_parallel)
        torch.manual_seed(5)
        assert_step(model, loss, gradients)

    run_ranks(TWO, rank)

    def masks(ctx: tpcore.ParallelContext) -> Tensor:
        model = adapted(llama, how, {**options, "targets": ["down_proj"]}, sequence_parallel=sequence_parallel)
        torch.manual_seed(5)
        seen: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.Dropout) and module.p:
                module.register_forward_hook(lambda m, args, y: seen.append(y == 0))
        model(**text())
        return torch.stack(seen)

    one, other = run_ranks(TWO, masks)
    assert 0.3 < (one != other).double().mean() < 0.7


DORA = {"use_dora": True}, r"LoraConfig\(use_dora=True\) is not there for a sharded model"
HEAD = {"targets": ["q_proj", "lm_head"]}, "leave it out of target_modules"
PISSA = {"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"


@pytest.mark.parametrize(("options", "message"), [DORA, HEAD])
@each_rank(tp=2)
def test_what_is_refused_before(ctx: tpcore.ParallelContext, options: dict[str, Any], message: str) -> None:
    whole = peft.get_peft_model(made(llama), config(**options))
    names = [n for n, _ in whole.named_modules()]
    with pytest.raises(ValueError, match=message):
        tpcore.parallelize(whole)
    assert [n for n, _ in whole.named_modules()] == names
    assert "default" in whole.peft_config


@pytest.mark.parametrize(("options", "message"), [DORA, HEAD, PISSA])
@each_rank(tp=2)
def test_what_is_refused_after(ctx: tpcore.ParallelContext, options: dict[str, Any], message: str) -> None:
    model = tpcore.parallelize(made(llama))
    with pytest.warns(UserWarning, match="Already found"), pytest.raises(ValueError, match=r"peft\.get_peft_model"):
        peft.get_peft_model(model, config())  # its own function names ours
    with pytest.raises(ValueError, match=message):
        get_peft_model(model, config(**options))
    assert not any("lora_" in name for name, _ in model.named_parameters())
    assert get_peft_model(model, config()) is not None


def test_initial_values_of_whole_weights_are_sharded_with_them() -> None:
    def adapters_of(cut: bool) -> Any:
        torch.manual_seed(0)
        model = llama().float()
        torch.manual_seed(8)
        found = peft.get_peft_model(model, config(["q_proj", "down_proj"], init_lora_weights="pissa"))
        return tpcore.parallelize(found) if cut else found

    loss, gradients = step(adapters_of(False))

    def rank(ctx: tpcore.ParallelContext) -> None:
        # float32, as PiSSA takes no float64: the order of sums differs
        assert_step(adapters_of(True), loss, gradients, 1e-5, 1e-5)

    run_ranks(TWO, rank)


STEPS = range(8)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if tpcore.is_initialized():
        return tpcore.Zero1(torch.optim.AdamW, trained, lr=1e-2)
    return torch.optim.AdamW(trained, lr=1e-2)


def train(model: Any, optimizer: Any, steps: range = STEPS) -> list[float]:
    """Losses and norms of clipped steps, of one process or of this mesh."""
    seen: list[float] = []
    for step in steps:
        ids = torch.randint(3, 99, (8, 8), generator=torch.Generator().manual_seed(step))
        if not tpcore.is_initialized():
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        else:
            batch = tpcore.current().batch
            mine = ids.chunk(batch.size)[int(batch.position)]
            loss = model(input_ids=mine, labels=mine).loss
            loss.backward()
            norm = tpcore.optimizer_step(optimizer, max_norm=0.5)
            loss = batch.all_reduce(loss.detach()) / batch.size
        optimizer.zero_grad()
        seen += [float(loss.detach()), float(norm)]
    return seen


@pytest.mark.parametrize(("how", "recompute"), tiers([("after", True)], [("before", False)]))
def test_training_and_its_checkpoint_on_another_mesh(how: str, recompute: bool, tmp_path: Path) -> None:
    """At tp=2 x dp=2, then at tp=4, as in one process."""
    options = {"lora_dropout": 0.0, "use_rslora": True}
    whole = adapted(llama, "", options)
    want = train(whole, optimizer_of(whole))

    def rank(ctx: tpcore.ParallelContext, steps: range) -> list[float]:
        model = adapted(llama, how, options)
        if recompute:
            model.enable_input_require_grads()
            activation_checkpointing(model.get_base_model())
        optimizer = optimizer_of(model)
        if steps.start:
            tpcore.checkpoint.load(tmp_path / "ck", model, model_key="model")
            tpcore.checkpoint.load(tmp_path / "ck", optimizer, model_key="optimizer")
        seen = train(model, optimizer, steps)
        tpcore.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "ck")
        return seen

    got = run_ranks(Mesh({"dp": 2, "tp": 2}), partial(rank, steps=STEPS[:4]))[0]
    got += run_ranks(Mesh({"dp": 1, "tp": 4}), partial(rank, steps=STEPS[4:]))[0]
    # AdamW divides by square roots of tiny sums in its first steps, which multiplies rounding
    assert got == pytest.approx(want, rel=0, abs=1e-9)


MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp 2 x tp 2": ({"dp": 2, "tp": 2}, {}),
    "tp 4": ({"dp": 1, "tp": 4}, {}),
    "pp 2": ({"pp": 2, "dp": 1, "tp": 1}, {"num_microbatches": 2}),
    "pp 2 x tp 2": ({"pp": 2, "dp": 1, "tp": 2}, {"num_microbatches": 2}),
    "cp 2 x tp 2": ({"dp": 1, "cp": 2, "tp": 2}, {}),
    "ep 2 x tp 2": ({"dp": 1, "ep": 2, "tp": 2}, {}),
    "ep 2 x cp 2": ({"dp": 1, "ep": 2, "cp": 2, "tp": 1}, {}),
    "ep 2 x cp 2 x tp 2": ({"dp": 1, "ep": 2, "cp": 2, "tp": 2}, {"dispatch": "all_to_all"}),
}
MESHED = [("llama", "dp 2 x tp 2"), ("llama", "cp 2 x tp 2")]
MESHED += [("mixtral", mesh) for mesh in ("pp 2", "ep 2 x tp 2", "ep 2 x cp 2 x tp 2")]
SLOW = [("gpt2", "tp 4"), ("bert", "dp 2 x tp 2"), ("qwen2", "cp 2 x tp 2"), ("llama", "pp 2 x tp 2")]
SLOW += [("mixtral", "ep 2 x cp 2")]


@pytest.mark.parametrize(("name", "mesh"), tiers(MESHED, slow=SLOW))
def test_steps_on_every_mesh(name: str, mesh: str, tmp_path: Path) -> None:
    axes, cuts = MESHES[mesh]
    make, targets = MODELS[name]

    def adapters() -> Any:
        model = peft.get_peft_model(made(make), config(targets))
        warm(model)
        return model

    dense = adapters()
    want = train(dense, optimizer_of(dense))

    def rank(ctx: tpcore.ParallelContext) -> list[float]:
        model = tpcore.parallelize(adapters(), **cuts)
        seen = train(model, optimizer_of(model))
        model.save_pretrained(tmp_path / "adapters")
        return seen

    for got in run_ranks(Mesh(axes), rank):
        # norms and rotary tables round to float32, and AdamW divides by roots of small squares
        assert got == pytest.approx(want, rel=1e-5)
    opened = peft.PeftModel.from_pretrained(made(make), tmp_path / "adapters")
    for key, p in opened.named_parameters():
        if "lora_" in key:
            torch.testing.assert_close(p, dense.get_parameter(key), rtol=0, atol=1e-4, check_dtype=False)


@each_rank(pp=2, dp=1, tp=1)
def test_adapters_come_before_stages(ctx: tpcore.ParallelContext) -> None:
    model = tpcore.parallelize(made(llama), num_microbatches=2)
    with pytest.raises(ValueError, match=r"of its stage alone, .* before, tpcore.parallelize\(peft.get_peft"):
        get_peft_model(model, config())


KINDS = ["bert", "deepseek_v3", "gemma3_text", "gpt_neox", "mixtral", "phi3", "qwen3_moe", "t5", "vit", "whisper"]
OLDER = {"falcon", "gpt2", "openai-gpt"}  # whose layers are of classes of their own
OTHERS = sorted(families.on_the_page("Work").keys() - OLDER)


def _of_family(name: str) -> Any:
    kind: Any = families.class_of(name)
    whole = families.made(kind, families.config_of(name))
    head = getattr(whole, "get_output_embeddings", lambda: None)()
    linear = [key for key, m in whole.named_modules() if type(m) is nn.Linear and m is not head]
    inside = [key for key in linear if any(map(str.isdigit, key.split(".")))]
    torch.manual_seed(1)
    model = peft.get_peft_model(whole, peft.LoraConfig(r=2, target_modules=inside))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_" in key:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


@pytest.mark.filterwarnings("ignore")  # of peft, on targets that a kind of model lacks
@pytest.mark.parametrize("name", tiers(["minicpm3", "olmo2"], slow=KINDS, drill=OTHERS))
def test_families(name: str) -> None:
    """Adapters of every linear layer: loss, output and the adapters' gradients. Experts' are refused."""
    kind: Any = families.class_of(name)
    if kind is None or families.refusal(kind, families.config_of(name), 2) is not None:
        return
    whole = _of_family(name)
    batch = families.batch_of(whole.get_base_model())
    want = families.step(whole.get_base_model(), batch)
    grads = {key: p.grad for key, p in whole.named_parameters() if p.requires_grad}

    def rank(ctx: tpcore.ParallelContext) -> float:
        model = _of_family(name)
        if any(type(m).__name__ == "ParamWrapper" for m in model.modules()):
            with pytest.raises(ValueError, match=r"\(ParamWrapper\): the adapters of a sharded model are LoRA's"):
                tpcore.parallelize(model)
            return 0.0
        got = families.step(tpcore.parallelize(model).get_base_model(), batch)
        found = [families.distance(a, b) for a, b in zip(got, want, strict=True)]
        for key, p in model.named_parameters():
            if p.requires_grad and grads[key] is not None:
                found.append(families.distance(p.grad, part(grads[key], p)))
        return max(found)

    assert max(run_ranks(TWO, rank)) < 1e-5  # norms of transformers round to float32
