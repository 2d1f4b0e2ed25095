"""Tokens on their way to the experts of other ranks: all-to-all and capacities, what they drop, and that it is told."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import families, hf
from helpers.hf import mixtral
from helpers.pipelines import assert_same_gradients
from helpers.tiers import tiers
from helpers.worlds import each_rank
from test_experts import EP_TP, WHOLE, batches
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tpcore
import tpcore_hf
from tpcore import Mesh
from tpcore.backend.grouped import grouped_matmul
from tpcore.comm import Transport
from tpcore.layout import Group
from tpcore.testing import run_ranks
from tpcore.testing.threads import ThreadBackend
from tpcore_hf.experts.dispatch import Dispatch, has_known_form, put, seated, taken, with_capacity
from tpcore_hf.experts.layers import ShardedExperts

EP2, EP4 = {"dp": 1, "ep": 2, "tp": 1}, {"dp": 1, "ep": 4, "tp": 1}
MESHES = {"ep 2": (EP2, {}), "ep 4": (EP4, {}), "ep 2 x tp 2": (EP_TP, {}), "ep 2 x tp 2, experts": (EP_TP, WHOLE)}


def layer_of(model: Any) -> ShardedExperts:
    return next(m for m in model.modules() if isinstance(m, ShardedExperts))


def large() -> Any:
    """With experts drawn large enough that each matters."""
    model = hf.double(mixtral)
    for name, p in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(5))
    return model


def chosen(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rank)
    numbers = torch.rand(12, 4, generator=draw).topk(2).indices
    x = torch.randn(12, 32, dtype=torch.float64, generator=draw)
    return x, numbers, torch.rand(12, 2, dtype=torch.float64, generator=draw)


SAME = {"rtol": 1e-12, "atol": 1e-12}  # float64: sums in another order


def outcome(experts: Any, given: Any, *parameters: Tensor, mask: float | Tensor = 1) -> tuple[Tensor, ...]:
    """What they make of these tokens, and the gradients of tokens, weights and ``parameters``."""
    x, numbers, weights = given
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(leaves[0], numbers, leaves[1] * mask)
    return out, *torch.autograd.grad(out.square().sum(), (*leaves, *parameters))


@each_rank(tp=2)
def test_arguments_that_do_not_fit_are_refused_as_by_the_own_forward(ctx: tpcore.ParallelContext) -> None:
    experts, (x, numbers, weights) = layer_of(tpcore.parallelize(hf.double(mixtral))), chosen(0)
    with pytest.raises(TypeError, match="multiple values for argument 'hidden_states'"):
        experts(x, numbers, weights, hidden_states=x * 2)
    with pytest.raises(TypeError, match="too many positional"):
        experts(x, numbers, weights, x)


@pytest.mark.parametrize("mesh", MESHES)
def test_all_to_all_with_room_is_what_gathering_makes(mesh: str) -> None:
    axes, options = MESHES[mesh]

    def rank(ctx: tpcore.ParallelContext) -> None:
        found = []
        for way in ({}, {"dispatch": "all_to_all"}, {"dispatch": "all_to_all", "capacity_factor": 8.0}):
            layer = layer_of(tpcore.parallelize(large(), **options, **way))
            found.append(outcome(layer, chosen(ctx.index(ctx.batch)), *layer.parameters()))
            assert str(layer.route).startswith(way.get("dispatch", "gathered"))
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], **SAME)

    run_ranks(Mesh(axes), rank)


def without_dropped(factor: float, ranks: list[Tensor], parts: int) -> tuple[list[Tensor], int]:
    """By loops: which choices of each rank have a seat, and how many have none. ``parts``: ranks that share the experts
    in an all-to-all; 1 where tokens are gathered."""
    tokens, choices = ranks[0].shape
    of_a_rank = min(tokens, math.ceil(factor * tokens * choices / parts)) if parts > 1 else tokens
    of_an_expert = math.ceil(factor * len(ranks) * tokens * choices / 4)
    kept, full = [torch.ones_like(numbers, dtype=torch.bool) for numbers in ranks], [0] * 4
    for mine, numbers in zip(kept, ranks, strict=True):
        sent = [0] * parts
        for token, row in enumerate(numbers.tolist()):
            for part in {number * parts // 4 for number in row}:
                sent[part] += 1
                for at, number in enumerate(row):
                    if number * parts // 4 == part and sent[part] > of_a_rank:
                        mine[token, at] = False
    for mine, numbers in zip(kept, ranks, strict=True):
        for token, row in enumerate(numbers.tolist()):
            for at, number in enumerate(row):
                full[number] += int(mine[token, at])
                mine[token, at] &= full[number] <= of_an_expert
    return kept, sum(int((~mine).sum()) for mine in kept)


DROPPING = {
    "tp 2": ({"dp": 1, "tp": 2}, {}),
    "tp 2, experts": ({"dp": 2, "tp": 2}, WHOLE),
    "one rank": ({"dp": 1, "tp": 1}, {}),
    "ep 2, gathered": (EP2, {"dispatch": "gathered"}),
    "ep 4, auto": (EP4, {"dispatch": "auto"}),
} | {f"{mesh}, all_to_all": (axes, {**options, "dispatch": "all_to_all"}) for mesh, (axes, options) in MESHES.items()}


# the last: a part drops both choices of a token, and has the seats of a share that is no whole number
SCARCE = [*zip(DROPPING, itertools.cycle([0.5, 1.0])), ("ep 2, all_to_all", 0.4)]


@pytest.mark.parametrize(("mesh", "factor"), SCARCE)
def test_what_is_dropped_is_left_out_and_counted(mesh: str, factor: float) -> None:
    axes, options = DROPPING[mesh]
    ep, data = axes.get("ep", 1), axes["dp"] * axes.get("ep", 1)
    given = [chosen(i) for i in range(data)]
    exchanged = options.get("dispatch", "gathered") != "gathered"
    parts = ep * (axes["tp"] if options.get("expert_parallel") else 1) if exchanged else 1
    groups = [given[i : i + ep] for i in range(0, data, ep)]  # of dp, each with its own seats
    seated_here = [without_dropped(factor, [numbers for _, numbers, _ in group], parts) for group in groups]
    kept = [mask for masks, _ in seated_here for mask in masks]
    dropped = sum(n for _, n in seated_here)
    whole = large().model.layers[0].mlp.experts

    def rank(ctx: tpcore.ParallelContext) -> float:
        model = tpcore.parallelize(large(), **options, capacity_factor=factor)
        layer, load, at = layer_of(model), tpcore_hf.ExpertLoad(model), ctx.index(ctx.batch)
        torch.testing.assert_close(outcome(layer, given[at]), outcome(whole, given[at], mask=kept[at]), **SAME)
        assert ep == 1 or str(layer.route).startswith("all_to_all" if exchanged else "gathered")
        (told,) = load.read().values()
        load.close()
        layer(*given[at])
        assert load.read() == {}
        return told.dropped

    assert dropped > 0
    assert run_ranks(Mesh(axes), rank) == [pytest.approx(dropped / (24 * data))] * Mesh(axes).size


HALF = torch.bfloat16
SENT = r"all-to-all sends {} bytes forward, {} rows to each rank, and gathering {}"


@pytest.mark.parametrize(
    ("dispatch", "dtype", "way"),
    [
        (Dispatch("auto", 1.25), torch.float32, "all_to_all: " + SENT.format("33,600", 40, "53,760")),
        (Dispatch("auto", 2.0), torch.float32, "gathered: " + SENT.format("53,760", 64, "53,760")),
        (Dispatch("auto"), torch.float32, "gathered: "),
        (Dispatch("auto"), HALF, "all_to_all: " + SENT.format("28,416", 64, "40,704")),  # sums in float32 are longer
        (Dispatch("gathered", 1.25), HALF, "gathered: .* 40 rows .*; dispatch='gathered' was asked for"),
        (Dispatch("all_to_all"), HALF, "all_to_all: .* 64 rows .*'all_to_all' was asked for"),
    ],
)
def test_auto_takes_what_sends_fewer_bytes_and_says_why(dispatch: Dispatch, dtype: torch.dtype, way: str) -> None:
    x, weights = torch.zeros(64, 32, dtype=dtype), torch.zeros(64, 2, dtype=dtype)
    numbers = torch.zeros(64, 2, dtype=torch.int64)
    assert re.match(way, str(dispatch.by_bytes(x, numbers, weights, 4, 4)))


def test_gradients_of_tokens_that_go_to_several_experts_are_summed_in_float32() -> None:
    """Three gradients of 1, 2^-8 and 2^-8: added one by one in bfloat16, of 8 bits, the small ones would vanish."""
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    source, dropped = seated(torch.tensor([[0, 1, 2]]), 3, 1)
    grads = torch.tensor([[1.0], [2**-8], [2**-8]], dtype=torch.bfloat16)
    (taken(x, source) * grads).sum().backward()
    assert x.grad is not None
    assert float(x.grad) == float(put(grads, source, 1)) == 1 + 2**-7
    assert int(dropped) == 0


def test_a_graph_multiplies_the_rows_of_each_expert_only() -> None:
    """The operator of traced programs: rows behind the last end, and experts without rows, are in no product."""
    x, weights = torch.randn(7, 3, dtype=torch.float64), torch.randn(4, 5, 3, dtype=torch.float64).transpose(1, 2)
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    torch.library.opcheck(grouped_matmul, (x, weights, ends))
    want = torch.stack([x[i] @ weights[of] for i, of in enumerate([0, 0, 2, 2, 2, 3])])
    torch.testing.assert_close(grouped_matmul(x, weights, ends), torch.cat([want, want.new_zeros(1, 5)]))


def test_no_values_are_read() -> None:
    """On meta tensors, which have none: the same program whichever experts are chosen."""
    layer = mixtral().to("meta").model.layers[0].mlp.experts
    x, numbers, weights = (t.to("meta") for t in chosen(0))
    out, dropped = with_capacity(layer, x.float(), numbers, weights.float(), 3)
    assert (out.shape, dropped.shape) == (x.shape, (1,))


def llama4() -> Any:
    return families.made(families.class_of("llama4_text"), families.config_of("llama4_text"))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (mixtral, {"dispatch": "broadcast"}, "dispatch='broadcast' is none of 'gathered', 'all_to_all' and 'auto'"),
        (mixtral, {"capacity_factor": 0.0}, "capacity_factor=0.0 is not above 0"),
        (hf.llama, {"dispatch": "auto"}, "dispatch='auto', capacity_factor=None: LlamaForCausalLM has no layers"),
        (llama4, {"capacity_factor": 1.0}, r"capacity_factor: .*experts \(Llama4TextExperts\) computes in"),
    ],
)
def test_what_cannot_be_dispatched_so(make: Any, options: dict[str, Any], words: str) -> None:
    hf.refused(words, make, **options)


class Kernel(ThreadBackend):
    """One with a kernel for experts, which takes all but float16, and leaves NaN in the rows of no expert."""

    calls: Counter[int] = Counter()  # by the rank's thread: ranks do not wait for each other between two readings

    def grouped_matmul(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor | None:
        if x.dtype == torch.float16:
            return None
        Kernel.calls[threading.get_ident()] += 1
        begins = [0, *ends.tolist()]
        runs = zip(pairwise(begins), weights, strict=True)
        parts = [x[begin:end] @ weight for (begin, end), weight in runs]
        rest = x.new_full((len(x) - begins[-1], weights.shape[2]), torch.nan)
        return Forgetting.apply(torch.cat([*parts, rest]), x, begins[-1])  # type: ignore[no-any-return]


class Compiled(ThreadBackend):
    """One whose steps become programs."""

    def connect(self, group: Group, rank: int) -> Transport:
        made = super().connect(group, rank)
        made.eager = False
        return made


class Forgetting(torch.autograd.Function):
    """Gives NaN as the gradients of rows from ``end`` on, as a kernel does that leaves memory as it was."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, end: int) -> Tensor:
        ctx.shape, ctx.end = x.shape, end
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        more = grad.new_zeros(ctx.shape)
        more[ctx.end :] = torch.nan
        return grad, more, None


KERNELS = ["tp 2", "tp 2, experts", "ep 2, gathered", "ep 2, all_to_all"]


@pytest.mark.parametrize(
    ("name", "mesh"),
    tiers(
        [*itertools.product(["mixtral"], KERNELS), ("gpt_oss", "tp 2"), ("gpt_oss", "ep 2, all_to_all")],
        slow=[("aria_text", "ep 2, all_to_all")],
    ),
)
def test_a_backends_kernel_computes_the_chosen_experts_and_one_program_all(name: str, mesh: str) -> None:
    axes, options = DROPPING[mesh]
    kind: Any = families.class_of(name)

    def make() -> Any:
        torch.manual_seed(0)
        model = families.made(kind, families.config_of(name)).double()
        for key, p in model.named_parameters():
            if ".experts." in key:
                torch.nn.init.normal_(p, std=0.1)
        return model

    whole = next(m for m in make().modules() if has_known_form(m))

    def called() -> int:
        return Kernel.calls[threading.get_ident()]

    def rank(ctx: tpcore.ParallelContext) -> None:
        layer, before = layer_of(tpcore.parallelize(make(), **options)), called()
        given = chosen(ctx.index(ctx.batch))
        torch.testing.assert_close(outcome(layer, given), outcome(whole, given), **SAME)
        assert (called() > before) == isinstance(ctx.backend, Kernel)
        half, before = [t.half() if t.is_floating_point() else t for t in given], called()
        assert layer.half()(*half).isfinite().all()
        assert called() == before

    for backend in (Kernel, Compiled):
        if name == "gpt_oss" and mesh != "tp 2":
            with pytest.raises(ValueError, match="computes with all experts at once"):
                run_ranks(Mesh(axes), rank, backend=backend)
        else:
            run_ranks(Mesh(axes), rank, backend=backend)


@pytest.mark.parametrize("mesh", ["tp 2", "ep 2, all_to_all"])
def test_torchs_kernel_computes_the_chosen_experts(mesh: str) -> None:
    """``grouped_mm`` of torch, by which transformers computes unless another implementation is asked for."""
    axes, options = DROPPING[mesh]
    kernels: list[str] = []

    class Noted(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kernels.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    def make() -> Any:
        torch.manual_seed(0)
        return mixtral(experts_implementation=None)

    whole, batch = make(), batches(1)[0][0]
    whole(**batch).loss.backward()

    def rank(ctx: tpcore.ParallelContext) -> None:
        model: Any = tpcore.parallelize(make(), **options)
        with Noted():
            model(**batch).loss.backward()
        tpcore.reduce_gradients(model)
        assert_same_gradients(model, whole, ctx, 1e-4, 1e-6)  # float32

    run_ranks(Mesh(axes), rank)
    assert "grouped_mm" in kernels or "_grouped_mm" in kernels
