"""A part never passes for the whole in a user's code: losses of one's own, and whoever else reads logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import composed, hf
from helpers.hf import llama, text
from helpers.tiers import tiers
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama
from transformers.trainer_pt_utils import LabelSmoother

import tpcore
from tpcore import Mesh
from tpcore.testing import run_ranks
from tpcore_hf.shard.figures import parameter_count
from tpcore_hf.shard.logits import Logits

TWO = Mesh({"tp": 2})
CONFIG = transformers.LlamaConfig(**hf.TINY, num_key_value_heads=2)


def z_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).pow(2).mean()


def next_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


# -- who reads the logits of a training step ---------------------------------------------------------------


def smoothed(output: Any, labels: Tensor) -> Tensor:
    return LabelSmoother(0.1)(output, labels, shift_labels=True)


def in_place(output: Any, labels: Tensor) -> Tensor:
    output.logits[:, :, 7] = 0
    output.logits /= 2
    return next_token(output.logits, labels)


def scaled(output: Any, labels: Tensor) -> Tensor:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = z_loss(output.logits * scale)
    return loss + torch.autograd.grad(loss, scale, retain_graph=True)[0]


class Doubled(torch.autograd.Function):
    """Gets a tensor without torch's functions in between, and gives its gradient back so."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return 2 * logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another term": lambda output, labels: output.loss + 1e-2 * z_loss(output.logits),
    "the loss alone": lambda output, labels: output.loss,
    "a loss in place of it": lambda output, labels: next_token(output.logits.float().to(torch.float64), labels),
    "a label smoother": smoothed,
    "numbers of the vocabulary": lambda output, labels: output.loss + output.logits[..., 60:].square().mean(),
    "log-probabilities of tokens": lambda output, labels: (
        output.loss
        + output.logits.log_softmax(-1).mean()
        - output.logits.gather(-1, labels.clamp(min=0)[..., None]).mean()
    ),
    "its size": lambda output, labels: output.loss + output.logits.sum() / output.logits.shape[-1],
    "an entropy": lambda output, labels: (
        output.loss - torch.distributions.Categorical(logits=output.logits).entropy().mean()
    ),
    "in place": in_place,
    "a function of autograd": lambda output, labels: next_token(Doubled.apply(output.logits), labels),
    "without gradients first": lambda output, labels: (
        output.loss * (1 + (output.logits.detach().argmax(-1) == labels).double().mean()) + z_loss(output.logits)
    ),
    "a learned scale": scaled,
}


def reading(how: str) -> Callable[[Any, dict[str, Any]], tuple[Tensor, ...]]:
    def run(model: Any, batch: dict[str, Any]) -> tuple[Tensor, ...]:
        output = model.train()(**batch)
        loss = READERS[how](output, batch["labels"])
        loss.backward()
        return (loss.detach(),)

    return run


@pytest.mark.parametrize("how", READERS)
def test_who_reads_logits_of_a_training_step_sees_the_whole(how: str) -> None:
    hf.assert_equals_whole(llama, (2,), run=reading(how))


@pytest.mark.parametrize("mesh", [{"dp": 1, "cp": 2, "tp": 1}, {"dp": 1, "cp": 2, "tp": 2}], ids=["cp", "cp and tp"])
def test_of_all_tokens_too(mesh: dict[str, int]) -> None:
    batch = {name: t for name, t in text().items() if name != "attention_mask"}
    for how in ("another term", "the loss alone", "a function of autograd"):
        hf.assert_equals_whole(llama, [mesh], batch, run=reading(how), tolerance=1e-6)  # norms are of float32


def test_parts_are_gathered_once_somebody_reads_them() -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(llama()).train()
        logits = model(**text()).logits
        assert isinstance(logits / 2, Logits)
        assert logits.float().read is None
        assert logits.shape == (3, 8, 99)
        assert len(logits) == 3
        assert logits.requires_grad
        loss = tpcore.parallel_cross_entropy(logits, text()["input_ids"])
        whole = logits + 0
        torch.testing.assert_close(loss, F.cross_entropy(whole.mT, text()["input_ids"], reduction="none"))
        with pytest.raises(ValueError, match="these 99 are those of the whole vocabulary"):
            tpcore.parallel_cross_entropy(logits, text()["input_ids"])
        assert type(whole) is Tensor
        assert logits.read is not None
        assert torch.equal(pickle.loads(pickle.dumps(logits.detach())), whole)
        assert torch.equal(copy.deepcopy(logits.detach()), whole)
        with pytest.raises(ValueError, match=r"call model.eval\(\), in which logits and their loss are whole"):
            logits.retain_grad()
        assert type(model.eval()(**text()).logits) is Tensor

    run_ranks(TWO, rank)


# -- forwards of one's own ---------------------------------------------------------------------------------


class AnotherTerm(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.loss = output.loss + 1e-2 * z_loss(output.logits)
        return output


def AddedOutput(logits: Tensor) -> Tensor:
    return z_loss(logits)


class Written(transformers.LlamaForCausalLM):
    """It reads logits in a function with a harmless name, and on one rank alone."""

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden)
        if not tpcore.is_initialized() or tpcore.current().rank == 0:
            assert logits.amax().isfinite()
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss + 1e-2 * AddedOutput(logits=logits), logits=logits)


class OtherLoss(transformers.LlamaForCausalLM):
    def loss_function(self, logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        return next_token(logits, labels) + 1e-2 * z_loss(logits)


def set_on_it() -> Any:
    model = llama()
    forward = model.forward

    def another(**kwargs: Any) -> Any:
        output = forward(**kwargs)
        return CausalLMOutputWithPast(loss=output.loss + z_loss(output.logits), logits=output.logits)

    model.forward = another
    return model


OWN: dict[str, Callable[[], Any]] = {
    "another term": lambda: AnotherTerm(copy.deepcopy(CONFIG)),
    "written": lambda: Written(copy.deepcopy(CONFIG)),
    "another loss": lambda: OtherLoss(copy.deepcopy(CONFIG)),
}


@pytest.mark.parametrize("how", [*OWN, "set on it"])
def test_a_forward_of_ones_own_has_whole_logits_and_the_log_says_what_they_cost(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tpcore")
    hf.assert_equals_whole(OWN.get(how, set_on_it), (2,))
    assert "logits are gathered in every step, for its forward is not transformers' own" in caplog.text


def test_a_forward_of_ones_own_would_see_one_ranks_tokens() -> None:
    hf.refused("its class is not transformers' own, and its forward would see", OWN["written"], {"cp": 2, "tp": 1})


# -- doors to saving, and figures --------------------------------------------------------------------------


def inner(model: Any) -> dict[str, Any]:
    """The models of transformers in ``model``, itself with them, by their names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, transformers.PreTrainedModel)}


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


STAGES = ({"pp": 2, "dp": 1, "tp": 2}, {"num_microbatches": 1})
MADE: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**hf.T5, decoder_start_token_id=0)),
    "mixtral": hf.mixtral,
    "llava": lambda: transformers.LlavaForConditionalGeneration(composed.CASES["LlavaForConditionalGeneration"][0]()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "on"),
    tiers(
        [("llama", ({"tp": 2}, {})), ("t5", ({"tp": 2}, {})), ("llama", STAGES)],
        [("mixtral", ({"tp": 2}, {})), ("llava", ({"tp": 2}, {}))],
    ),
)
def test_each_model_inside_is_saved_whole(make: str, on: Any, tmp_path: Path) -> None:
    whole = hf.double(MADE[make])
    names = [name for name, m in inner(whole).items() if next(m.parameters(), None) is not None]
    assert len(names) > 1
    for name in names:
        whole.get_submodule(name).save_pretrained(tmp_path / "want" / (name or "all"))

    def rank(ctx: tpcore.ParallelContext) -> None:
        model = tpcore.parallelize(hf.double(MADE[make]), **on[1])
        for name in names:
            options = {"safe_serialization": True, "push_to_hub": False, "token": None, "max_shard_size": "1.5GB"}
            model.get_submodule(name).save_pretrained(tmp_path / "got" / (name or "all"), **options)

    run_ranks(Mesh(on[0]), rank)
    for name in names:
        got, want = (stored(tmp_path / folder / (name or "all")) for folder in ("got", "want"))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], t) for key, t in want.items())


class Saving(transformers.LlamaForCausalLM):
    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        super().save_pretrained(*args, **kwargs)


@pytest.mark.parametrize("how", ["a model around it", "a save of its own", "a variant", "to the hub"])
def test_other_doors_are_refused_with_the_remedy(how: str, tmp_path: Path) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        options: dict[str, Any] = {"a variant": {"variant": "fp16"}, "to the hub": {"push_to_hub": True}}.get(how, {})
        model: Any = tpcore.parallelize(Saving(copy.deepcopy(CONFIG)) if how == "a save of its own" else llama())
        if how == "a model around it":
            around = transformers.LlamaForSequenceClassification(copy.deepcopy(CONFIG))
            around.model = model.model
            model = around
        words = "does not take (variant='fp16'|push_to_hub=True)" if options else "one rank's part of .*write the whole"
        with pytest.raises(ValueError, match=words):
            model.save_pretrained(tmp_path / str(ctx.rank), **options)

    run_ranks(TWO, rank)


def figures(model: Any) -> list[int]:
    found = [parameter_count(model), parameter_count(model, trainable_only=True)]
    assert found == [model.num_parameters(), model.num_parameters(only_trainable=True)]
    for m in inner(model).values():
        found += [m.num_parameters(), m.num_parameters(only_trainable=True), m.num_parameters(exclude_embeddings=True)]
        found += [m.get_memory_footprint(), m.get_memory_footprint(return_buffers=False)]
    return found


def partly_frozen(make: str) -> Any:
    model = MADE[make]()
    first = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    first.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "on"),
    [("llama", ({"tp": 2}, {})), ("t5", ({"tp": 4}, {})), ("mixtral", ({"ep": 2, "tp": 2}, {})), ("llama", STAGES)],
)
def test_figures_are_of_the_whole_model(make: str, on: Any) -> None:
    want = figures(partly_frozen(make))
    for found in run_ranks(Mesh(on[0]), lambda ctx: figures(tpcore.parallelize(partly_frozen(make), **on[1]))):
        assert found == want


# -- between a user's column layer and the next row layer --------------------------------------------------


def normed(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


LINES: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm": normed,
    "a softmax": lambda x: x.softmax(-1),
    "the largest": lambda x: x.masked_fill(x < x.topk(8, dim=-1).values[..., -1:], 0),
    "a mean": lambda x: x - x.mean(-1, keepdim=True),
    "a cumulative sum": lambda x: x.cumsum(-1),
    "two halves": lambda x: x * torch.cat([half.sigmoid() for half in reversed(x.chunk(2, -1))], -1),
    "split": lambda x: x * x.split(x.shape[-1] // 2, -1)[1].sum(),
    "a half": lambda x: x * x[..., : x.shape[-1] // 2].sum(),
    "the first": lambda x: x - x[..., 0, None],
    "two views": lambda x: x * x.unflatten(-1, (2, -1)).unbind(-2)[0].sum(),
    "side by side": lambda x: x * torch.cat([x, x], -1).view(*x.shape, 2)[..., 0].sum(),
    "as often": lambda x: x * x.repeat(1, 1, 2).view(*x.shape, 2)[..., 0].sum(),
    "as often, by name": lambda x: x * torch.tile(x, dims=(1, 1, 2)).view(*x.shape, 2)[..., 0].sum(),
    "by names": lambda x: x * torch.cat(dim=-1, tensors=[x, x]).view(*x.shape, 2)[..., 0].sum(),
    "by an axis": lambda x: x * torch.concatenate([x, x], axis=-1).view(*x.shape, 2)[..., 0].sum(),
    "in depth": lambda x: x * torch.dstack([x, x]).view(*x.shape, 2)[..., 0].sum(),
    "turned": lambda x: torch.fliplr(x.transpose(1, 2)).transpose(1, 2),
    "halves in depth": lambda x: x * torch.dsplit(x, 2)[0].sum(),
    "of all": lambda x: x + x.take(torch.arange(3)).sum(),
    "along all": lambda x: x + torch.take_along_dim(x, torch.zeros(1, dtype=torch.long), dim=None).sum(),
    "a diagonal": lambda x: x + x.diagonal(0, 1, 2).sum(-1)[:, None, None],
}
"""What is refused by its name, and below by its values alone."""
ANY: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved": lambda x: x.view(*x.shape[:-1], 4, -1).transpose(-1, -2).flatten(-2),
    "tokens turned": lambda x: x.mT.reshape(x.shape),
    "stacked": lambda x: torch.stack(x.unflatten(-1, (-1, 2)).unbind(-1), -2).flatten(-2),
    "windows": lambda x: x + F.pad(x.unfold(-1, 2, 1).mean(-1), (0, 1)),
    "groups": lambda x: F.group_norm(x.mT, 4).mT,
    "neighbours": lambda x: F.local_response_norm(x.mT, 3).mT,
    "a pool": lambda x: x + F.avg_pool1d(x, 3, 1, 1),
    "a loss": lambda x: x * F.mse_loss(x, torch.zeros_like(x)),
    "waves": lambda x: torch.fft.fft(x).real,
    "distances": lambda x: x * torch.cdist(x, x).mean(),
    "a norm of torch.linalg": lambda x: x / torch.linalg.norm(x, dim=-1, keepdim=True),
    "a quantile": lambda x: x - x.quantile(0.5, dim=-1, keepdim=True),
    "a count": lambda x: x * (x > 0).sum(-1, keepdim=True),
    "products": lambda x: x * (x @ x.mT).tanh().mean(),
    "einsum": lambda x: x * torch.einsum("bsh,bsh->bs", x, x)[..., None],
}
SELECTED: dict[str, Callable[[Tensor], Tensor]] = {"selected": lambda x: x + x.masked_select(x > 0).sum()}
NUMBERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of an output": lambda line, x: x / x.shape[-1] ** 0.5,
    "of a weight": lambda line, x: x / line.up.weight.size(0),
    "of the next": lambda line, x: x / line.down.weight.shape[1],
    "of entries": lambda line, x: x + line.up.weight.numel(),
    "places": lambda line, x: x * torch.arange(x.shape[-1]),
}
EACH: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of a layer": lambda line, x: x / line.up.out_features + line.down.in_features,
    "every second": lambda line, x: torch.stack([x[..., 1::2], x[..., ::2].exp()], -1).flatten(-2),
    "tokens": lambda line, x: x + x[:, :1] + x.chunk(2, 1)[1].mean(1, keepdim=True),
    "once": lambda line, x: x + torch.tile(x, dims=(1, 1, 1)) + x.repeat(repeats=(1, 1, 1)),
    "tokens side by side": lambda line, x: torch.hstack([x[:, :2], x[:, 2:]]),
    "by value": lambda line, x: x.index_put((x > 0,), torch.zeros((), dtype=x.dtype)),
    "heads": lambda line, x: x.view(3, 8, -1, 8).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
    "heads with the batch": lambda line, x: (
        x.view(3, 8, -1, 8).transpose(1, 2).flatten(0, 1).cumsum(1).view(3, -1, 8, 8).transpose(1, 2).flatten(2)
    ),
    "waves of tokens": lambda line, x: torch.fft.fft(x, dim=1).real,
    "a head on each rank": lambda line, x: torch.cat(x.view(3, 8, -1, 2, 16)[..., :16].unbind(-2), -1).flatten(2),
}


class Line(torch.nn.Module):
    """``values``: whether its forward needs some."""

    def __init__(self, work: Callable[[Any, Tensor], Tensor], values: bool = False) -> None:
        super().__init__()
        self.work, self.values = work, values
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.work(self, self.up(x))
        return self.down(y if not self.values or y.isfinite().all() else y.relu())


class LlamaLine(modeling_llama.LlamaMLP):  # type: ignore[misc]
    """A user's class with a family's layers."""

    work: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.work(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


@pytest.mark.parametrize("how", ["a norm", "an activation"])
def test_work_in_a_users_class_under_a_familys_plan_is_right_or_refused(how: str) -> None:
    def with_line() -> Any:
        model = llama()
        for layer in model.model.layers:
            layer.mlp.__class__, layer.mlp.work = LlamaLine, LINES.get(how, F.gelu)
        return model

    assert_line(how, with_line)


def assert_line(how: str, make: Callable[[], Any], **options: Any) -> None:
    """A model of elementwise work alone is the whole one; the other work is refused."""
    if how in LINES:
        hf.refused("sees only (32|1|2) of (64|2|4) features", make, **options)
    elif how in ANY:
        hf.refused(r"down \(Linear\) reads other values on a rank than in the whole model.*replicate", make, **options)
    else:
        hf.assert_equals_whole(make, (2,), **options)


LINE = {"model.layers.*.mlp.up": "colwise", "model.layers.*.mlp.down": "rowwise"}


def with_lines(work: Callable[[Any, Tensor], Tensor], **options: Any) -> Any:
    model = llama()
    for layer in model.model.layers:
        layer.mlp = Line(work, **options)
    return model


def of(how: str) -> Callable[[Any, Tensor], Tensor]:
    work = (LINES | ANY | SELECTED).get(how, F.gelu)
    return EACH.get(how, lambda line, x: work(x))


@pytest.mark.parametrize("how", [*LINES, *ANY, *EACH, "an activation"])
def test_work_between_the_layers_of_a_users_plan_is_right_or_refused(how: str) -> None:
    assert_line(how, lambda: with_lines(of(how)), plan=LINE)


@pytest.mark.parametrize("how", NUMBERS)
def test_a_number_of_what_a_rank_has_is_refused(how: str) -> None:
    words = r"mlp \(Line\) computes with a number of what a rank has: \w+ by .*, and by .* in the whole model"
    hf.refused(words, lambda: with_lines(NUMBERS[how]), plan=LINE)


@pytest.mark.parametrize("how", ["interleaved", "every second"])
def test_a_forward_that_needs_values_is_tried_with_some(how: str) -> None:
    assert_line(how, lambda: with_lines(of(how), values=True), plan=LINE)


def test_hooks_hide_nothing_from_a_trial_and_see_nothing_of_it() -> None:
    seen: list[object] = []

    def hooked() -> Any:
        model = with_lines(of("interleaved"))
        model.model.norm.register_forward_hook(lambda *call: seen.append(call))
        return model

    assert_line("interleaved", hooked, plan=LINE)
    assert not seen


class Weighted(transformers.LlamaForCausalLM):
    """Its forward needs a number, and reads of a layer what a rank has a part of."""

    def forward(self, input_ids: Tensor, weight: Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        return output if weight < 0 else output.logits * self.model.layers[0].mlp.gate_proj.weight.square().mean()


def test_what_else_a_forward_needs_is_made_up() -> None:
    def weighted() -> Any:
        model = llama()
        model.__class__ = Weighted
        return model

    hf.refused(r"its forward \(Weighted\) reads a parameter of model.layers.\*.mlp.gate_proj itself", weighted)


class NeedsMore(transformers.LlamaForCausalLM):
    """A forward that nothing can be tried with."""

    def forward(self, weight: dict[str, float], **batch: Any) -> Any:
        assert weight["loss"] == 1
        return super().forward(**batch)


@pytest.mark.parametrize("how", ["a softmax", "two halves", "selected", "every second"])
def test_in_a_forward_that_needs_more_than_tokens_the_first_call_refuses(how: str) -> None:
    def rank(ctx: tpcore.ParallelContext) -> None:
        model = with_lines(of(how))
        model.__class__ = NeedsMore
        tpcore.parallelize(model, plan=LINE)
        with pytest.raises(ValueError, match="sees only 32 of 64 features") if how not in EACH else nullcontext():
            model({"loss": 1}, **text())

    run_ranks(TWO, rank)


class Gate(torch.nn.Module):
    """Two projections in one layer, and two that are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(torch.cat([gate.sigmoid() * up, up], -1))


GATE = {"model.layers.*.mlp.both": "packed_colwise", "model.layers.*.mlp.down": "packed_rowwise"}


def test_blocks_are_the_remedy_where_projections_are_in_one() -> None:
    def with_gate() -> Any:
        model = llama()
        for layer in model.model.layers:
            layer.mlp = Gate()
        return model

    hf.assert_equals_whole(with_gate, (2, 4), plan=GATE)
    words = "chunk takes or adds features by their places, and sees only 32 of 64 .*'packed_colwise'"
    hf.refused(words, with_gate, plan=dict(zip(GATE, ("colwise", "rowwise"), strict=True)))
