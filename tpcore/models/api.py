"""``parallelize``: decide the cuts, check the degree, replace modules, then connect loss and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from ..comm.comm import Comm
from ..layers import ColumnParallelLinear
from ..log import inform
from ..runtime.context import ParallelContext, current, use
from . import plan as styles
from . import quantized
from .attentions import gather_attentions
from .batching import batch_alike
from .context import context_of, cut_context
from .cuts import Cut, attentions, decide
from .dispatch import Dispatch
from .dropout import drop_by_rank
from .experts import check_dispatch, dispatch_by
from .fit import check_fit
from .generation import generate_alike
from .guards import guard, is_guarded
from .heads import HeadsArgument, head_size, localize
from .inputs import share_inputs
from .inside import inside
from .loading import read_parts, stored_weights
from .loss import cut_loss
from .plan import Rule, checked
from .replace import replace
from .sequence import cut_sequence
from .share import summary
from .stages import groups, into_stages, number_of_stages
from .transformers import checked_model, rules_of
from .whole import save_whole

Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    *,
    plan: Mapping[str, Rule] | None = None,
    sequence_parallel: bool = False,
    expert_parallel: bool = False,
    dispatch: str = "gathered",
    capacity_factor: float | None = None,
    context_parallel: str | None = None,
    num_microbatches: int | None = None,
    lazy_from: str | os.PathLike[str] | None = None,
    quantize: torch.dtype | None = None,
    ctx: ParallelContext | None = None,
) -> Model:
    """Cut a transformers model over the tp group, in place, by its own plan; returns the model.

    Names of parameters and modules stay, tied tensors stay tied, and each Parameter stays the same object,
    so that an optimizer made before keeps working. ``model.config`` is not changed.

    ``plan``: rules that override the model's own. A rule is a style for a name of ``model.named_modules()``,
    with ``*`` for the number of a layer; ``"replicate"`` leaves a module whole. Instead of a style it may be
    the blocks (``tpcore.Block``) in which a linear layer's output features are cut.
    ``sequence_parallel``: between attention and MLP each rank keeps some of the tokens, in every forward
    whose number of tokens tp divides. ``expert_parallel``: each tp rank has whole experts of every layer that has
    some, instead of features of all experts. At ``ep`` above 1 the experts are divided among the ep ranks besides.
    ``dispatch``: how tokens come to the experts of other ep ranks: "gathered" all, "all_to_all" those that chose one
    there, or "auto", what sends fewer bytes. ``capacity_factor``: an expert, and a rank of an all-to-all, takes the
    first choices up to so many times its even share; others are dropped, and ``tpcore.models.ExpertLoad`` counts them.
    None: no choice is dropped, and all-to-all sends as much as gathering does.
    ``lazy_from``: a directory of safetensors or ``.bin`` files from which each rank reads its part; default: the
    directory of ``from_pretrained`` in ``tpcore.lazy()``. ``ctx``: the parallel context; default: the current one.
    ``quantize``: ``torch.int8`` or ``torch.float8_e4m3fn``, to which the weights of linear layers, heads excepted, are
    quantized and frozen, with a scale for each output channel: new Parameters, ``weight`` and ``weight_scale``. The
    same at every degree.

    ``context_parallel``: how attention sees the tokens of the other cp ranks, "gather" (the default), "ulysses" or
    "ring" (``tpcore.layers.ContextParallelAttention``), or "auto": for each length the one that sends the fewest bytes
    of those that keep no more for backward than the rest of a layer; rank 0 says why. At ``cp`` above 1 every rank of
    cp passes the same whole sequences, the model takes its tokens of them, and the loss is that of the whole batch.

    ``num_microbatches``: the model's layers become ``tpcore.PipelinedLayers``, each stage keeps its own, and
    the vocabulary is cut over stages and tp together. Required at ``pp`` above 1, where the optimizer has to
    be made afterwards. ``tpcore.PipelineModel(model, ...)`` then runs one forward, one backward.

    Raises ValueError before any change: for a model without a plan, a rule that matches nothing, a style that
    is not supported, and sizes that tp does not divide (one error for all, with the degrees that fit).
    Collective: every rank of the tp group calls it with the same model and arguments.
    """
    context = ctx or current()
    if _has_adapters(model):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "expert_parallel": expert_parallel}
        options |= {"dispatch": dispatch, "capacity_factor": capacity_factor}
        options |= {"plan": plan, "context_parallel": context_parallel, "lazy_from": lazy_from, "quantize": quantize}
        _with_adapters(model, context, num_microbatches, **options)
        return model
    comm, sending = context.comm("tp"), Dispatch(dispatch, capacity_factor)
    checked_model(model)
    quantized.check(model, quantize, staged=num_microbatches is not None)
    if is_guarded(model):
        raise ValueError(f"this {type(model).__name__} is sharded already: parallelize it once, from the whole")
    tokens = context_of(model, context, context_parallel)
    stages = number_of_stages(context, num_microbatches)
    with use(context), quantized.torchao_aside(model, quantize, staged=num_microbatches is not None):
        rules, cuts = _decided(model, dict(plan or {}), expert_parallel, context, stages, sending)
        weights = stored_weights(model, lazy_from, context)  # while the model has all names and shapes
        if cuts:
            over = groups(model, context, stages)
            _replace(model, cuts, comm, over)
            dispatch_by(model, sending)
            if context.rank == 0:
                inform(summary(model) + sending.warning)
        if num_microbatches is not None:
            cuts = into_stages(model, cuts, num_microbatches, stages)
        if comm.size * stages > 1 or cuts:
            _connect(model, cuts, comm, rules, sequence_parallel)
            generate_alike(model, context.comm("pp", "tp") if stages > 1 else comm)
        batch_alike(model, context)
        if tokens is not None:
            cut_context(model, *tokens)
        if weights is not None:
            read_parts(model, weights, context, quantize)
        elif quantize is not None:
            quantized.quantize_all(model, quantize)
    return model


def _decided(
    model: nn.Module,
    rules: dict[str, Rule],
    expert_parallel: bool,
    context: ParallelContext,
    stages: int,
    sending: Dispatch,
) -> tuple[Mapping[str, Rule], list[Cut]]:
    """The rules of the model with those that were given, and all cuts; ValueError for what does not fit."""
    tp, ep = context.comm("tp").size, context.mesh.axes.get("ep", 1)
    checked(rules, [name for name, _ in (*model.named_modules(), *model.named_parameters())])
    rules = rules_of(model, rules)
    cuts = decide(model, rules, expert_parallel, ep)
    of_experts = [cut for cut in cuts if cut.style == styles.EXPERTS]
    check_dispatch(type(model).__name__, {cut.name: cut.module for cut in of_experts}, sending)
    if tp * stages == 1:
        cuts = of_experts  # where steps are compiled, they are one program at tp=1 too
    if tp > 1:
        cuts += inside(model, cuts, rules)
    check_fit(type(model).__name__, [need for cut in cuts for need in cut.needs], tp)
    return rules, cuts


def _with_adapters(model: nn.Module, context: ParallelContext, num_microbatches: int | None, **options: Any) -> None:
    """``parallelize`` a model with adapters of peft, which step aside meanwhile."""
    from ..train.pipeline import PipelinedLayers
    from . import adapters

    base = adapters.base_of(model)
    with adapters.aside(base):
        parallelize(base, ctx=context, num_microbatches=num_microbatches, **options)
    for module in base.modules():
        if isinstance(module, PipelinedLayers):
            module.mark_places()
    if model is not base:
        adapters.bound(model)


def _has_adapters(model: nn.Module) -> bool:
    return any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())


def _replace(model: nn.Module, cuts: list[Cut], comm: Comm, over: Callable[[Cut], Comm]) -> None:
    """Put parallel layers in place, and give attention modules their local number of heads."""
    heads = list(attentions(model, cuts))
    all_heads = {owner: width // (head_size(owner) or 1) for owner, width, _ in heads}
    replace(model, cuts, over)
    for owner, width, projections in heads:
        if any(cut.module is owner and cut.style == styles.HEADS_ARGUMENT for cut in cuts):
            hook = HeadsArgument(comm, all_heads[owner])
            owner.register_forward_pre_hook(hook, with_kwargs=True)
        localize(owner, comm.size, max(cut.copies(comm.size) for cut in projections), width)
    gather_attentions(model, all_heads, comm)


def _connect(model: nn.Module, cuts: list[Cut], comm: Comm, rules: Mapping[str, Rule], sequence_parallel: bool) -> None:
    """Set up what passes between the layers: tokens, shared inputs, random numbers, the loss."""
    draws = drop_by_rank(model, cuts, rules)
    if sequence_parallel:
        cut_sequence(model, cuts, comm, draws)
    else:
        share_inputs(model, cuts)
    _cut_loss(model, cuts)
    guard(model)
    model.__dict__.setdefault("save_pretrained", MethodType(save_whole, model))


def _cut_loss(model: nn.Module, cuts: list[Cut]) -> None:
    head = model.get_output_embeddings()  # type: ignore[operator]
    gathered = {cut.name for cut in cuts if cut.style == styles.COLUMN_GATHERED}
    if gathered and isinstance(head, ColumnParallelLinear):
        cut_loss(model, head)
