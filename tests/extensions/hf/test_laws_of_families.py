"""Laws that a family of transformers keeps when it is sharded, whatever a user has attached, asks for and calls.

Each is kept, with the values of the whole model, or refused by a ValueError; nothing in between.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import hf
from helpers.families import SINGLE, Whole, _first, _some_loss, class_of, config_of, distance, on_the_page
from helpers.tiers import tiers
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import tpcore
from tpcore import CheckpointError, Mesh
from tpcore.testing import run_ranks

# what transformers and torch say while tiny models of odd sizes are made
pytestmark = pytest.mark.filterwarnings("ignore")
WORKING = sorted(on_the_page("Work"))
TWO = Mesh({"tp": 2})
EXACT, ROUNDED = 1e-5, 1e-4
"""Norms of transformers round to float32, whose step is 1e-7; some families compute in float32."""
Found = dict[tuple[str, str], Tensor | None]
"""By what was called, and by name: a loss, or the gradient of a parameter."""


def whole(family: str) -> Whole:
    kind = class_of(family)
    assert kind is not None
    return Whole.of(kind, config_of(family))


def cut(model: Any, **options: Any) -> Any:
    return tpcore.parallelize(copy.deepcopy(model), **options)


def backward(model: Any, loss: Tensor, what: str = "") -> Found:
    """The loss and its gradients, of which the parameters are free again."""
    loss.backward()
    found: Found = {(what, name): p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found | {(what, "the loss"): loss.detach()}


def kept(given: Whole, run: Callable[[Any, dict[str, Tensor]], Found], works: bool = False, **options: Any) -> None:
    """``run`` of the sharded model makes what it makes of the whole one, or, if it needs not work, ``parallelize``
    refuses the model."""
    want = run(copy.deepcopy(given.model), given.batch)
    limit = ROUNDED if given.model.config.model_type in SINGLE else EXACT

    def rank(ctx: tpcore.ParallelContext) -> str | None:
        try:
            model = cut(given.model, **options)
        except ValueError as e:
            if works:
                raise
            return str(e)
        got, parameters = run(model, given.batch), dict(model.named_parameters())
        assert got.keys() in (want.keys(), set())  # or the call was refused
        for key in got:
            expected, found, p = want[key], got[key], parameters.get(key[1])
            if expected is None or found is None:
                assert expected is found, key
                continue
            full = expected if p is None else hf.part(expected, p)
            assert distance(found, full) < limit, f"{key} differs by {distance(found, full):.0e}"
        return None

    run_ranks(TWO, rank)


def called(model: Any, batch: dict[str, Tensor]) -> Any:
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    torch.manual_seed(1)  # what a model draws is drawn by its copies too
    return model(**batch, **options)


# -- hooks ------------------------------------------------------------------------------------------------
def _each_feature(values: Any) -> Any:
    """Of the first tensor another multiple of each feature: wrong with a part of them."""
    if isinstance(values, tuple) and values:
        return (_each_feature(values[0]), *values[1:])
    if not isinstance(values, Tensor) or not values.is_floating_point() or not values.ndim:
        return values
    return values * torch.linspace(0.9, 1.1, values.shape[-1], dtype=values.dtype)


def _after(module: nn.Module, args: Any, output: Any) -> Any:
    return _each_feature(output)


def _before(module: nn.Module, args: Any) -> Any:
    return _each_feature(args)


def _backward(module: nn.Module, of_input: Any, of_output: Any) -> Any:
    return _each_feature(of_input)


KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "hooks": ("register_forward_hook", _after),
    "pre_hooks": ("register_forward_pre_hook", _before),
    "backward_hooks": ("register_full_backward_hook", _backward),
}


def _hooked(model: Any, names: list[str], kind: str) -> Any:
    register, hook = KINDS[kind]
    for name in names:
        getattr(model.get_submodule(name), register)(hook)
    return model


def _accepted(model: Any, kind: str) -> list[str]:
    """The modules whose hooks ``parallelize`` takes: of the first of layers alike, all but those that it names."""
    first = {re.sub(r"\d+", "*", name): name for name, _ in reversed([*model.named_modules()]) if name}

    def rank(ctx: tpcore.ParallelContext) -> list[str]:
        names = [] if ctx.rank else [*first.values()]  # each rank finds the same, with nothing from another
        while refused := _refused(model, names, kind):
            names.remove(refused)
        return names

    return run_ranks(TWO, rank)[0]


def _refused(model: Any, names: list[str], kind: str) -> str | None:
    """The module of ``names`` that a refusal names first."""
    hooked = _hooked(copy.deepcopy(model), names, kind)
    before = [*hooked.modules()]
    try:
        tpcore.parallelize(hooked)
    except ValueError as e:
        why = str(e)
    else:
        return None
    assert [*hooked.modules()] == before
    found = {at.start(): name for name in names if (at := re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", why))}
    assert found, why
    return found[min(found)]


def attached(kind: str, family: str, folder: Path) -> None:
    """Hooks that were set on modules before ``parallelize`` see whole features after, or it refuses, and says where."""
    given = whole(family)
    _hooked(given.model, _accepted(copy.deepcopy(given.model).to("meta"), kind), kind)

    def run(model: Any, batch: dict[str, Tensor]) -> Found:
        output = called(model.train(), batch)
        own = getattr(output, "loss", None)
        return backward(model, _some_loss(_first(output)) if own is None else own)

    kept(given, run)


# -- a loss of one's own ----------------------------------------------------------------------------------
def own_loss(family: str, folder: Path) -> None:
    """What a loop computes from the logits of a training step, and of an evaluation, is of the whole vocabulary: all
    families of the page work."""

    def run(model: Any, batch: dict[str, Tensor]) -> Found:
        found = backward(model, _some_loss(_first(called(model.train(), batch))))
        with torch.no_grad():
            return found | {("evaluated", "the loss"): _some_loss(_first(called(model.eval(), batch)))}

    kept(whole(family), run, works=True)


# -- files ------------------------------------------------------------------------------------------------
def _files(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def inner_save(family: str, folder: Path) -> None:
    """The model, and one inside it, writes what it writes whole, or nothing."""
    model = whole(family).model
    names = [n for n, m in model.named_modules() if isinstance(m, PreTrainedModel)]

    def rank(ctx: tpcore.ParallelContext) -> None:
        sharded = cut(model)
        for name in names:
            with suppress(ValueError, CheckpointError):
                sharded.get_submodule(name).save_pretrained(folder / f"{name} sharded")

    for name in names:
        model.get_submodule(name).save_pretrained(folder / f"{name} whole")
    run_ranks(TWO, rank)
    for name in names:
        want, got = _files(folder / f"{name} whole"), _files(folder / f"{name} sharded")
        if not (folder / f"{name} sharded").exists():
            continue  # refused
        assert got.keys() == want.keys(), name
        assert all(torch.equal(got[n], t) for n, t in want.items()), name


# -- forwards in turns ------------------------------------------------------------------------------------
def _shorter(batch: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    return {n: t[:, :tokens].contiguous() if t.ndim == 2 and t.shape[1] == 8 else t for n, t in batch.items()}


def turns(family: str, folder: Path) -> None:
    """The backward of a forward is its own, whatever was called in between: with sharded tokens, computed again."""
    given = whole(family)
    odd = 7 if "input_ids" in given.batch else 8  # of which two ranks have no equal parts

    def run(model: Any, batch: dict[str, Tensor]) -> Found:
        if model.supports_gradient_checkpointing:
            hf.recompute(model)
        try:
            losses = {n: _some_loss(_first(called(model.train(), _shorter(batch, n)))) for n in (8, 6)}
        except ValueError as e:  # of ViT's patches and class token; of DeBERTa, which reads what is between its blocks
            assert re.search("pad the batch to a multiple of 2|leave out what asks for it", str(e))  # noqa: PT017
            return {}
        with torch.no_grad():
            called(model.eval(), _shorter(batch, odd))
        model.train()
        found: Found = {}
        for n, loss in losses.items():
            found |= backward(model, loss, f"{n} tokens")
        return found

    kept(given, run, sequence_parallel=True)


LAWS: dict[str, Callable[[str, Path], None]] = {kind: partial(attached, kind) for kind in KINDS}
LAWS |= {law.__name__: law for law in (own_loss, inner_save, turns)}
FEW = ("llama", "bert", "gpt2", "t5", "mixtral", "vit")
QUICK = [(family, law) for family in FEW for law in LAWS if family != "t5" or law not in KINDS]


ERRORS = {
    "backward_hooks": "embedding_gemma2_text falcon flaubert gemma3n_text llama4_text roc_bert xlm",
    "inner_save": "deepseek_v4 dots3_note_text zaya",
}
OF_THE_WHOLE = [(family, law) for law, names in ERRORS.items() for family in names.split()]
"""Of which the whole model itself ends in an error: its forward changes in place what a backward hook has seen, or a
configuration inside it cannot be written."""


@pytest.mark.parametrize(
    ("family", "law"), tiers(QUICK, (p for p in itertools.product(WORKING, LAWS) if p not in OF_THE_WHOLE))
)
def test_a_family_keeps_the_law(family: str, law: str, tmp_path: Path) -> None:
    LAWS[law](family, tmp_path)


@pytest.mark.parametrize(("family", "law"), tiers((), OF_THE_WHOLE))
def test_the_whole_model_errs_by_itself(family: str, law: str, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, StrictDataclassError), match=r"is being modified inplace|Class validation error"):
        LAWS[law](family, tmp_path)
