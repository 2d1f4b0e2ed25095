"""What is attached to a model before it is sharded: it stays, and sees whole features, or is refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from helpers.hf import double, llama, mixtral, part, text
from helpers.tiers import tiers
from helpers.worlds import each_rank
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks

# peft asks transformers by names that it has given up
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
Attach = Callable[[Any, Tensor], Any]
TWO = Mesh({"tp": 2})
EXACT = 1e-11  # float64: another order of sums
ROUNDS = 1e-7  # Mixtral's router computes in float32
COLUMN, ROW = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"
KEYS = "model.layers.0.self_attn.k_proj"  # at tp=4 each head of keys is on two ranks
TABLE, HEAD, NORM, BLOCK = "model.embed_tokens", "lm_head", "model.layers.1.input_layernorm", "model.layers.0"
EXPERTS = "model.layers.0.mlp.experts"


def _first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def _again(value: Any, x: Tensor) -> Any:
    return (x, *value[1:]) if isinstance(value, tuple) else x


def scaled(module: Any, alpha: Tensor) -> None:
    """By a parameter that is nobody's: its gradient is that of all features."""
    module.register_forward_hook(lambda m, args, out: _again(out, _first(out) * alpha))


def normed(module: Any, alpha: Tensor) -> None:
    """Which a part of the features cannot be."""

    def hook(m: Any, args: Any, kwargs: Any, out: Any) -> Any:
        y = _first(out)
        return _again(out, y * alpha / y.norm(dim=-1, keepdim=True))

    module.register_forward_hook(hook, with_kwargs=True, always_call=True)


def skipped(module: Any, alpha: Tensor) -> None:
    """The output, and some of the input."""

    def hook(m: Any, args: Any, out: Any) -> Any:
        added = args[0].to(torch.float64).mean(-1, keepdim=True).view(*args[0].shape[: _first(out).ndim - 1], 1)
        return _again(out, _first(out) + alpha * added)

    module.register_forward_hook(hook)


def mixed(module: Any, alpha: Tensor) -> None:
    """The features that enter, each with its neighbour."""
    module.register_forward_pre_hook(lambda m, args: (args[0] + alpha * args[0].roll(1, -1), *args[1:]))


def in_place(module: Any, alpha: Tensor) -> None:
    """With keywords, and nothing returned."""

    def hook(m: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            args[0].mul_(args[0].max() / 3)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def halved(module: Any, alpha: Tensor) -> None:
    module.register_full_backward_hook(lambda m, entered, left: tuple(g if g is None else g / 2 for g in entered))


def stopped(module: Any, alpha: Tensor) -> None:
    module.register_full_backward_pre_hook(lambda m, left: tuple(g / left[0].norm() for g in left))


def forward(module: Any, alpha: Tensor) -> None:
    own = module.forward
    module.forward = MethodType(
        lambda self, *args, **kwargs: _again(out := own(*args, **kwargs), _first(out) * 2), module
    )


SEEN = {"scaled": scaled, "normed": normed, "skipped": skipped, "mixed": mixed}
CARRIED: list[tuple[str, Attach]] = [(n, f) for n in (COLUMN, ROW, KEYS, HEAD, NORM) for f in SEEN.values()]
CARRIED += [(n, scaled) for n in (TABLE, BLOCK)] + [(n, normed) for n in (TABLE, BLOCK)]
CARRIED += [(n, f) for n in (NORM, HEAD, BLOCK) for f in (halved, stopped)]
CARRIED += [(NORM, forward), (BLOCK, forward), (ROW, in_place)]
QUICK = [
    (ROW, scaled),
    (COLUMN, normed),
    (KEYS, skipped),
    (ROW, mixed),
    (HEAD, normed),
    (TABLE, scaled),
    (HEAD, stopped),
]
QUICK += [(BLOCK, forward), (ROW, in_place)]


def results(model: Any, alpha: nn.Parameter) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The loss, the gradient of what the hook reads, and those of the model."""
    model.train()
    loss = model(**text()).loss
    loss.backward()
    if tpcore.is_initialized():
        tpcore.reduce_gradients(model)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), alpha.grad, grads


def with_attached(make: Callable[[], Any], name: str, attach: Attach) -> tuple[Any, nn.Parameter]:
    model, alpha = double(make), nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))
    attach(model.get_submodule(name), alpha)
    return model, alpha


def assert_carried(make: Callable[[], Any], name: str, attach: Attach, mesh: dict[str, int], **options: Any) -> None:
    loss, of_alpha, grads = results(*with_attached(make, name, attach))
    plain = results(double(make), nn.Parameter(torch.zeros(1)))
    atol = ROUNDS if make is mixtral else EXACT
    same = torch.equal(loss, plain[0]) and all(torch.equal(g, plain[2][n]) for n, g in grads.items())
    assert not same, "what is attached changes nothing"

    def rank(ctx: tpcore.ParallelContext) -> None:
        model, alpha = with_attached(make, name, attach)
        before = {n: (id(m), *map(id, m._parameters.values())) for n, m in model.named_modules()}
        tpcore.parallelize(model, **options)
        for n, now in model.named_modules():
            module, *parameters = before[n]
            assert id(now) == module
            assert parameters == [id(p) for p in now._parameters.values()][: len(parameters)]
        got, of_got, mine = results(model, alpha)
        torch.testing.assert_close(got, loss, rtol=0, atol=atol)
        if "num_microbatches" not in options:  # a stage recomputes, for its own parameters
            torch.testing.assert_close(of_got, of_alpha, rtol=0, atol=atol)
        for n, p in model.named_parameters():
            torch.testing.assert_close(mine.get(n), part(grads[n], p), rtol=0, atol=atol, msg=n)

    run_ranks(Mesh(mesh), rank)


@pytest.mark.parametrize(("name", "attach"), tiers(QUICK, CARRIED))
def test_carried(name: str, attach: Attach) -> None:
    assert_carried(llama, name, attach, {"tp": 4 if name == KEYS else 2})


MESHES: list[dict[str, int]] = [{"tp": 2}, {"ep": 2, "tp": 1}, {"ep": 2, "tp": 2}]
OF_EXPERTS = [(f, whole, mesh) for f in (*SEEN.values(), stopped) for whole in (False, True) for mesh in MESHES]


@pytest.mark.parametrize(("attach", "whole", "mesh"), tiers(OF_EXPERTS[5:26:10], OF_EXPERTS))
def test_carried_by_experts(attach: Attach, whole: bool, mesh: dict[str, int]) -> None:
    assert_carried(mixtral, EXPERTS, attach, mesh, expert_parallel=whole)


ON_STAGES = [(n, f) for n in (COLUMN, ROW, HEAD, BLOCK) for f in (scaled, normed, mixed)] + [(TABLE, normed)]


@pytest.mark.parametrize(("name", "attach"), tiers(ON_STAGES[4::4], ON_STAGES))
def test_carried_by_stages(name: str, attach: Attach) -> None:
    """A layer sees one microbatch at a time."""
    assert_carried(llama, name, attach, {"pp": 2, "tp": 2}, num_microbatches=3)


def attached(model: Any) -> Any:
    """Each module, what it is and what it has, by identity."""
    found = []
    for name, m in model.named_modules():
        tables = {k: [(i, id(v)) for i, v in t.items()] for k, t in vars(m).items() if isinstance(t, dict)}
        found.append((name, id(m), type(m), {k: id(v) for k, v in vars(m).items() if k != "training"}, tables))
    return found, [(id(p), p.data_ptr(), tuple(p.shape), sorted(vars(p))) for p in model.parameters()]


def assert_refused(words: str, model: Any, **options: Any) -> None:
    want, before = model(**text()).logits, attached(model)
    with pytest.raises(ValueError, match=words):
        tpcore.parallelize(model, **options)
    assert attached(model) == before
    assert torch.equal(model(**text()).logits, want)


def by_prune(module: Any, _: Tensor) -> None:
    prune.l1_unstructured(module, "weight", 0.5)


def by_weight_norm(module: Any, _: Tensor) -> None:
    parametrizations.weight_norm(module)


def by_orthogonal(module: Any, _: Tensor) -> None:
    parametrizations.orthogonal(module)


def parameter(module: Any, _: Tensor) -> None:
    module.scale = nn.Parameter(torch.ones(1))


def hides(module: Any, _: Tensor) -> None:
    module.outputs = []


def graded(module: Any, _: Tensor) -> None:
    module.weight.grad = torch.ones_like(module.weight)


def method(module: Any, _: Tensor) -> None:
    module.__class__ = type("Stateful", (nn.Linear,), {"get_extra_state": lambda self: 3})


ACTIVATION, ATTENTION = "model.layers.0.mlp.act_fn", "model.layers.0.self_attn"
REFUSED = [
    (n, f) for n in (COLUMN, ROW) for f in (halved, stopped, forward, by_prune, by_weight_norm, by_orthogonal, method)
]
REFUSED += [(n, f) for n in (TABLE, HEAD) for f in (forward, by_prune, parameter, graded)]
REFUSED += [(COLUMN, hides), (ROW, graded), (ACTIVATION, scaled), (ACTIVATION, forward), (ATTENTION, forward)]


@each_rank(tp=2)
@pytest.mark.parametrize(("name", "attach"), [pytest.param(n, f, id=f"{f.__name__} {n}") for n, f in REFUSED])
def test_refused_by_name_before_any_change(ctx: tpcore.ParallelContext, name: str, attach: Attach) -> None:
    model, _ = with_attached(llama, name, attach)
    assert_refused(f"^{re.escape(name)}[ :]", model)


@each_rank(tp=2)
@pytest.mark.parametrize("name", [EXPERTS, f"{EXPERTS}.act_fn"])
def test_experts_refuse(ctx: tpcore.ParallelContext, name: str) -> None:
    model, _ = with_attached(mixtral, name, forward)
    assert_refused(f"^{re.escape(name)}[ :]", model)


SOME = [(COLUMN, normed), (TABLE, scaled), (HEAD, halved), (NORM, forward)]
SOME += [(name, scaled) for name in (ROW, NORM, BLOCK, "model.layers.1.mlp")]


@pytest.mark.parametrize(("name", "attach"), SOME)
def test_carried_beside_cut_tokens(name: str, attach: Attach) -> None:
    assert_carried(llama, name, attach, {"tp": 2}, sequence_parallel=True)


def without_gradient(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)


def dropped(model: Any) -> None:
    model.config.layerdrop = 0.5


def scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.gain = nn.Parameter(torch.ones(1))


LATE = {
    "the last block may not run": (dropped, {"tp": 2}, {"sequence_parallel": True}),
    "in every block what is whole and no norm": (scale, {"tp": 2}, {"sequence_parallel": True}),
    "layers 0 and 1 would do the same": (without_gradient, {"pp": 2, "tp": 2}, {"num_microbatches": 3}),
    "num_microbatches": (lambda _: None, {"pp": 2, "tp": 2}, {"num_microbatches": 0}),
    "tied to 'weight' of a Linear, which the plan leaves": (
        lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
        {"tp": 2},
        {"plan": {"lm_head": "replicate"}},
    ),
}


@pytest.mark.parametrize("words", LATE)
def test_whatever_is_refused_the_model_is_as_it_was(words: str) -> None:
    change, mesh, options = LATE[words]

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = double(llama)
        change(model)
        assert_refused(words, model, **options)

    run_ranks(Mesh(mesh), rank)


def kept(module: Any) -> list[str]:
    """Attach what no forward reads; what they note is returned."""
    notes: list[str] = []
    module.register_state_dict_pre_hook(lambda m, prefix, keep: notes.append("saves"))
    module.register_state_dict_post_hook(lambda m, state, prefix, meta: notes.append("saved"))
    module.register_load_state_dict_pre_hook(lambda m, *_: notes.append("loads"))
    module.register_load_state_dict_post_hook(lambda m, _: notes.append("loaded"))
    module.tag, module.note = {"a": 1}, MethodType(lambda self: self.tag, module)
    if not isinstance(module, nn.ModuleList):
        module.register_buffer("seen", torch.arange(3))
        module.register_buffer("passing", torch.arange(4), persistent=False)
        module.beside = nn.Dropout(0.1)
    return notes


def assert_kept(module: Any, notes: list[str]) -> None:
    state = module.state_dict()
    assert "seen" in state or isinstance(module, nn.ModuleList | tpcore.PipelinedLayers)
    assert "passing" not in state
    module.load_state_dict(state)
    assert notes == ["saves", "saved", "loads", "loaded"]
    assert module.note() == {"a": 1}
    assert isinstance(getattr(module, "beside", nn.Dropout(0.1)), nn.Dropout)


KEPT = [(n, {"tp": 2}) for n in (COLUMN, ROW, TABLE, HEAD, NORM, BLOCK, EXPERTS)]
KEPT += [(n, {"pp": 2, "tp": 1}) for n in (TABLE, HEAD, "model.layers")]  # blocks of stages have the same buffers


@pytest.mark.parametrize(("name", "mesh"), KEPT, ids=str)
def test_what_no_forward_reads_is_kept(name: str, mesh: dict[str, int]) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = double(mixtral if name == EXPERTS else llama)
        module = model.get_submodule(name)
        notes = kept(module)
        handle = module.register_forward_hook(lambda *_: notes.append("runs"))
        step = module.weight.register_post_accumulate_grad_hook(lambda p: None) if hasattr(module, "weight") else None
        tpcore.parallelize(model, num_microbatches=3 if "pp" in mesh else None)
        assert model.get_submodule(name) is module
        assert step is None or step.id in module.weight._post_accumulate_grad_hooks
        handle.remove()
        model(**text())
        assert_kept(module, notes)

    run_ranks(Mesh(mesh), rank)


FROM = {
    "column": (lambda: nn.Linear(8, 8), tpcore.ColumnParallelLinear.from_plain),
    "a part": (lambda: nn.Linear(8, 8), lambda m: tpcore.ColumnParallelLinear.from_plain(m, gather_output=False)),
    "row": (lambda: nn.Linear(8, 8), tpcore.RowParallelLinear.from_plain),
    "table": (lambda: nn.Embedding(8, 8), tpcore.ParallelEmbedding.from_plain),
    "norm": (lambda: nn.LayerNorm(8), tpcore.LayerNorm.from_plain),
}


@each_rank(tp="tp")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", FROM)
def test_a_layer_made_of_a_module_has_what_that_has(ctx: tpcore.ParallelContext, kind: str, tp: int) -> None:
    make, from_plain = FROM[kind]
    torch.manual_seed(0)
    plain: Any = make().double()
    notes = kept(plain)
    plain.note = lambda: plain.tag
    scaled(plain, torch.full((1,), 3.0, dtype=torch.float64))
    plain.weight.register_hook(lambda g: g * 2)
    plain.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 3))
    plain.weight.tag = "a"
    x = torch.arange(4) if kind == "table" else torch.randn(4, 8, dtype=torch.float64)
    layer: Any = from_plain(plain)
    want, got = plain(x), layer(x)
    shared = layer.tp.all_gather(got, -1) if kind == "a part" else got
    torch.testing.assert_close(shared, want, rtol=0, atol=EXACT)
    for y in (got, want):
        y.square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, part(plain.weight.grad, layer.weight), rtol=0, atol=EXACT)
    assert layer.weight.tag == "a"
    assert_kept(layer, notes)
    layer.register_forward_hook(lambda *_: None).remove()
    assert type(plain) in (nn.Linear, nn.Embedding, nn.LayerNorm), "it stays as it was"
    assert isinstance(layer, type(plain)) is (kind != "a part")


@each_rank(tp=2)
def test_from_plain_refuses(ctx: tpcore.ParallelContext) -> None:
    for attach, words in ((forward, "set on it"), (by_prune, "prune.remove"), (hides, "outputs, and the layer")):
        plain = nn.Linear(8, 8)
        attach(plain, torch.ones(1))
        with pytest.raises(ValueError, match=rf"ColumnParallelLinear.from_plain: \w*Linear has .*{words}"):
            tpcore.ColumnParallelLinear.from_plain(plain)
    scaled(plain := nn.Linear(8, 8), torch.ones(1))
    with pytest.raises(ValueError, match="would see this rank's tokens"):
        tpcore.ColumnParallelLinear.from_plain(plain, sequence_dim=1)


@each_rank(tp=2)
def test_stands_in_for_torchs_module_where_it_takes_and_returns_the_whole(ctx: tpcore.ParallelContext) -> None:
    model = tpcore.parallelize(double(llama))
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    inside = [m for m in model.model.layers.modules() if isinstance(m, tpcore.ParallelModule)]
    assert not any(isinstance(m, nn.Linear) for m in inside)
    experts = tpcore.parallelize(double(mixtral)).get_submodule(EXPERTS)
    assert isinstance(experts, type(mixtral().get_submodule(EXPERTS)))
    assert experts.has_gate
    copy.deepcopy(model)


def adapted(name: str = "", attach: Attach | None = None) -> tuple[Any, nn.Parameter]:
    model, alpha = double(llama), nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))
    targets = ["k_proj", "up_proj", "down_proj", "embed_tokens"]
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if attach is not None:
        attach(made.base_model.model.get_submodule(name), alpha)
    return made, alpha


LORA = [(f"{n}{inner}", f) for n in (COLUMN, ROW, KEYS) for inner in ("", ".base_layer") for f in SEEN.values()]
LORA += [(f"{n}.lora_{ab}.default", normed) for n in (COLUMN, ROW) for ab in "AB"] + [(TABLE, normed)]


@pytest.mark.parametrize(("name", "attach"), tiers(LORA[1::5], LORA))
def test_carried_by_layers_with_adapters(name: str, attach: Attach) -> None:
    torch.manual_seed(0)
    loss, of_alpha, grads = results(*adapted(name, attach))

    def rank(ctx: tpcore.ParallelContext) -> None:
        model, alpha = adapted(name, attach)
        before = {id(m) for m in model.modules()}
        tpcore.parallelize(model)
        assert {id(m) for m in model.modules()} == before
        got, of_got, mine = results(model, alpha)
        torch.testing.assert_close(got, loss, rtol=0, atol=EXACT)
        torch.testing.assert_close(of_got, of_alpha, rtol=0, atol=EXACT)
        for n, p in model.named_parameters():
            torch.testing.assert_close(mine.get(n), part(grads[n], p) if n in grads else None, rtol=0, atol=EXACT)

    run_ranks(TWO, rank)


OF_ADAPTERS = [("", forward), ("", halved), (".lora_A.default", halved), (".lora_A.default", by_weight_norm)]
OF_ADAPTERS += [(".lora_B.default", graded), (".base_layer", forward), (".base_layer", graded)]


@each_rank(tp=2)
@pytest.mark.parametrize(("inner", "attach"), [*OF_ADAPTERS, (".lora_dropout.default", scaled)])
def test_layers_with_adapters_refuse(ctx: tpcore.ParallelContext, inner: str, attach: Attach) -> None:
    model, _ = adapted(f"{COLUMN}{inner}", attach)
    assert_refused(re.escape(COLUMN), model)


@pytest.mark.parametrize("made_first", [False, True], ids=["", "adapters"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "tokens"])
def test_inputs_that_require_gradients_reach_all_that_is_trained(made_first: bool, sequence_parallel: bool) -> None:
    """Recomputation with use_reentrant has a backward only if its input has one."""

    def trained(sharded: bool) -> tuple[float, int]:
        model: Any = double(llama).requires_grad_(False)
        if made_first:
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        if not made_first:
            model.model.layers[-1].requires_grad_(True)
        if sharded:
            tpcore.parallelize(model, sequence_parallel=sequence_parallel)
        loss = model.train()(**text()).loss
        loss.backward()
        return float(loss.detach()), sum(p.grad is not None for p in model.parameters())

    loss, count = trained(sharded=False)
    assert count == (8 if made_first else 9)
    for got in run_ranks(TWO, lambda _: trained(sharded=True)):
        assert got == (pytest.approx(loss, abs=ROUNDS), count)


@each_rank(tp=2)
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_prompts_of_peft_are_refused(ctx: tpcore.ParallelContext, kind: str) -> None:
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(double(llama), config)
    before = attached(model)
    with pytest.raises(ValueError, match="adapters of a sharded model are LoRA's, not P"):
        tpcore.parallelize(model)
    assert attached(model) == before
