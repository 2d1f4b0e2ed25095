"""``parallelize``: decide the cuts, check the degree, replace modules, divide into stages, connect loss and tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn

from tpcore.backend.registry import observer_of
from tpcore.comm.comm import Comm
from tpcore.comm.signature import checked_calls
from tpcore.layers import ColumnParallelLinear
from tpcore.layers.adopt import shard
from tpcore.layers.apply import initialized
from tpcore.layers.module import ParallelModule
from tpcore.log import inform
from tpcore.private import backward_hooks
from tpcore.runtime.context import ParallelContext, current, use
from tpcore.runtime.gradients import sum_in_tree
from tpcore.train.pipeline import find_layers

from .experts.dispatch import GATHERED, Dispatch, check_dispatch
from .experts.layers import dispatch_by
from .generate.alike import batch_alike, generate_alike
from .load.gathered import save_whole
from .load.lazy import read_parts, stored_weights
from .plan import rules as styles
from .plan.decisions import Cut, attentions, check_inside, decide
from .plan.heads import check_fit, gather_attentions, head_size, heads_argument, localize
from .plan.model import checked_model, rules_of
from .plan.padded import with_padding
from .plan.rules import Rule, checked
from .plan.stages import into_stages, number_of_stages
from .private import of_transformers
from .sequence.context_parallel import context_of, cut_context
from .sequence.sequence_parallel import cut_sequence
from .shard import quantized
from .shard.figures import count_whole, summary_of
from .shard.forwards import drop_by_rank, share_inputs
from .shard.gradients import watch_first
from .shard.logits import cut_loss
from .shard.products import check_in_blocks, multiply_each_alone
from .shard.refusals import guard, is_guarded
from .shard.replace import layers_for, replace, restored_if_refused
from .shard.trial import check_forward, is_fused, is_uncompared

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class ParallelizeOptions:
    """What ``parallelize`` was asked for, and in which job."""

    ctx: ParallelContext
    plan: dict[str, Rule]
    sequence_parallel: bool
    expert_parallel: bool
    sending: Dispatch
    num_microbatches: int | None
    layers_per_stage: Sequence[int] | str | None
    stages: int


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
    layers_per_stage: Sequence[int] | str | None = None,
    lazy_from: str | os.PathLike[str] | None = None,
    quantize: torch.dtype | None = None,
    ctx: ParallelContext | None = None,
) -> Model:
    """Shard a transformers model over the tp group, in place, by its own plan; returns the model.

    Names of parameters and modules stay, tied tensors stay tied, and each Parameter stays the same object, so that an
    optimizer made before keeps working. ``model.config`` is not changed. Collective: every rank of the tp group calls
    it with the same model and arguments.

    Args:
        model: of transformers, or one that peft has given adapters.
        plan: rules that override the model's own. A rule is a style for a name of ``model.named_modules()``, with ``*``
            for any number of a layer or an ``expert_1``; ``"replicate"`` leaves a module whole. Instead of a style it
            may be the blocks (``tpcore.Block``) in which a linear layer's output features are sharded.
        sequence_parallel: between attention and MLP each rank keeps some of the tokens, in every forward whose number
            of tokens tp divides.
        expert_parallel: each tp rank has whole experts of every layer that has some, instead of features of all. At
            ``ep`` above 1 the experts are divided among the ep ranks besides.
        dispatch: how tokens come to the experts of other ep ranks: "gathered" all, "all_to_all" those that chose one
            there, or "auto", what sends fewer bytes.
        capacity_factor: an expert, and a rank of an all-to-all, takes the first choices up to so many times its even
            share; others are dropped, and ``tpcore_hf.ExpertLoad`` counts them. None: no choice is dropped, and
            all-to-all sends as much as gathering does.
        context_parallel: how attention sees the tokens of the other cp ranks, "gather" (the default), "ulysses" or
            "ring" (``tpcore.layers.ContextParallelAttention``), or "auto": for each length the one that sends the
            fewest bytes of those that keep no more for backward than the rest of a layer; rank 0 says why. Every rank
            of cp passes the same whole sequences, the model takes its tokens of them, and the loss is that of the whole
            batch.
        num_microbatches: required at ``pp`` above 1: the model's layers become ``tpcore.PipelinedLayers``, each stage
            keeps its own, and stages and tp together shard the vocabulary, so that embedding and head take no
            stage longer than another. The optimizer has to be made afterwards.
        layers_per_stage: on eager backends, a number for each stage, or "balanced": as of ``PipelinedLayers``.
        lazy_from: a directory of safetensors or ``.bin`` files from which each rank reads its part; default: the
            directory of ``from_pretrained`` in ``tpcore.lazy()``.
        quantize: ``torch.int8`` or ``torch.float8_e4m3fn``, to which the weights of linear layers, heads excepted, are
            quantized and frozen: new Parameters ``weight`` and ``weight_scale``, of each output channel, the same at
            every degree.
        ctx: default: the current context.

    Raises:
        ValueError: before any change: for a model without a plan, a rule that matches nothing, a style that is not
            supported, and sizes that tp does not divide (one error for all, with the degrees that fit).
        TypeError: for what is no model of transformers.
    """
    context, staged = ctx or current(), num_microbatches is not None
    adapters: AbstractContextManager[Any] = nullcontext(model)
    if any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        from .adapters.sharded import aside

        adapters = aside(model)
    sending, stages = Dispatch(dispatch, capacity_factor), number_of_stages(context, num_microbatches)
    staging = num_microbatches, layers_per_stage, stages
    options = ParallelizeOptions(context, dict(plan or {}), sequence_parallel, expert_parallel, sending, *staging)
    with use(context), adapters as base:
        checked_model(base)
        quantized.check(base, quantize, staged=staged)
        if is_guarded(base):
            raise ValueError(f"this {type(base).__name__} is sharded already: parallelize it once, from the whole")
        tokens = context_of(base, context, context_parallel)
        with quantized.torchao_aside(base, quantize, staged=staged):
            rules, cuts = _decided(base, options)
            weights = stored_weights(base, lazy_from, context)  # while the model has all names and shapes
            with restored_if_refused(base), cut_context(base, tokens):
                layers, summary = _change(base, rules, cuts, options)
            shard(filter(set(base.modules()).__contains__, layers))  # others are on another stage
            if context.rank == 0 and layers:
                inform(summary)
            if weights is not None:
                read_parts(base, weights, context, quantize)
            elif quantize is not None:
                for _, layer in quantized.layers_of(base):
                    quantized.quantize(base, layer, quantize)
        sum_in_tree(model.parameters())
        if checked_calls():
            watch_first(model, base, context.comm("tp"))
    return model


def _change(
    model: nn.Module, rules: Mapping[str, Rule], cuts: list[Cut], options: ParallelizeOptions
) -> tuple[list[ParallelModule], str]:
    """All but the values of Parameters: the layers that will have a part, and in a line what they are."""
    context, comm, sending = options.ctx, options.ctx.comm("tp"), options.sending
    layers = _replace(model, rules, cuts, options) if cuts else []
    dispatch_by(model, sending)
    summary = summary_of(model, sending.capacity_factor)
    cuts = into_stages(model, cuts, options.num_microbatches, options.layers_per_stage)
    if comm.size * options.stages > 1 or cuts:
        if whole := _connect(model, cuts, comm, rules, options.sequence_parallel):
            summary += f"; tokens stay whole around what may mix them: {', '.join(whole)}"
        experts = context.comm(*context.mesh.present(("ep",)))
        generate_alike(model, context.comm("pp", "tp") if options.stages > 1 else comm, experts)
    batch_alike(model, context)
    return layers, summary


def _decided(model: nn.Module, options: ParallelizeOptions) -> tuple[Mapping[str, Rule], list[Cut]]:
    """The rules of the model with those that were given, and all cuts; ValueError for what does not fit."""
    tp, axes, sending = options.ctx.comm("tp").size, options.ctx.mesh.axes, options.sending
    checked(options.plan, [name for name, _ in (*model.named_modules(), *model.named_parameters())])
    rules = rules_of(model, options.plan, sequence_parallel=options.sequence_parallel)
    cuts = decide(model, rules, options.expert_parallel, axes.get("ep", 1))
    of_experts = [cut for cut in cuts if cut.style == styles.EXPERTS]
    check_dispatch(type(model).__name__, {cut.name: cut.module for cut in of_experts}, sending)
    cp, factor, most = axes.get("cp", 1), sending.capacity_factor, options.ctx.reproducible
    if cp > 1 and factor is not None and sending.way != GATHERED:
        raise ValueError(
            f"dispatch={sending.way!r} with capacity_factor={factor} over cp={cp}: seats would be for a rank's own "
            f"tokens, not for whole sequences: pass dispatch={GATHERED!r}, or no capacity_factor"
        )
    if tp * options.stages == 1 and most is None:
        cuts = of_experts  # where steps are compiled, they are one program at tp=1 too
    if most is not None:  # heads of zeros would be others at each degree
        check_in_blocks(cuts, most, factor)
    elif tp > 1:
        cuts = with_padding(model, cuts, tp)
    check_fit(model, [need for cut in cuts for need in cut.needs], tp)
    return rules, cuts


def _replace(
    model: nn.Module, rules: Mapping[str, Rule], cuts: list[Cut], options: ParallelizeOptions
) -> list[ParallelModule]:
    """Put parallel layers in place, and give attention modules their local number of heads."""
    context, comm = options.ctx, options.ctx.comm("tp")
    heads = list(attentions(model, cuts))
    all_heads = {owner: width // (head_size(owner) or 1) for owner, width, _ in heads}
    padded = {owner: cuts[0].padded for owner, _, cuts in heads if cuts[0].padded}

    def localize_all() -> None:
        for owner, width, projections in heads:
            localize(owner, comm.size, max(cut.copies(comm.size) for cut in projections), width, padded.get(owner))

    over = _groups(model, context, options.stages)
    made = layers_for(cuts, over)
    if comm.size > 1 or context.reproducible is not None:
        check_forward(model, cuts, made, options.plan, localize_all)
        check_inside(model, cuts, rules)
    layers = replace(model, cuts, made, over)
    _watch(model, cuts, options.plan, context)
    for owner in all_heads:
        if any(cut.module is owner and cut.style == styles.HEADS_ARGUMENT for cut in cuts):
            owner.register_forward_pre_hook(partial(heads_argument, comm, all_heads[owner]), with_kwargs=True)
    localize_all()
    gather_attentions(model, all_heads, {owner: here.queries for owner, here in padded.items()}, comm)
    return layers


def _watch(model: nn.Module, cuts: list[Cut], user: Mapping[str, Rule], context: ParallelContext) -> None:
    """Look at what follows the layers that a user's rules, or in a user's class a family's, leave in parts: no plan was
    compared for it."""
    for cut in cuts:
        layer = model.get_submodule(cut.name)
        if isinstance(layer, ColumnParallelLinear) and is_uncompared(model, cut, user) and context.observer is None:
            layer.observer = observer_of(context, certain=True) if checked_calls() else None
            layer.fused = is_fused(cut, cuts)


def _connect(
    model: nn.Module, cuts: list[Cut], comm: Comm, rules: Mapping[str, Rule], sequence_parallel: bool
) -> list[str]:
    """Set up what passes between the layers: tokens, shared inputs, random numbers, the loss. Returns where tokens stay
    whole that were to be shared."""
    draws, whole = drop_by_rank(model, cuts, rules), list[str]()
    if sequence_parallel:
        whole = cut_sequence(model, cuts, comm, draws)
    else:
        share_inputs(model, cuts)
    multiply_each_alone(model, cuts if comm.blocks else [])
    head = model.get_output_embeddings()  # type: ignore[operator]
    gathered = isinstance(head, ColumnParallelLinear) and any(cut.style == styles.COLUMN_GATHERED for cut in cuts)
    # what is attached that sees logits, or their gradients, sees whole ones
    if gathered and not (backward_hooks(head) or "forward" in vars(model)):
        cut_loss(model, head)
    guard(model)
    save = model.__dict__.get("save_pretrained")  # of a quantized model, a refusal
    for part in model.modules():
        if hasattr(part, "save_pretrained"):  # a model of transformers, the outermost or one inside
            count_whole(part)
            part.__dict__["_init_weights"] = partial(initialized, fn=cast(Any, part)._init_weights)
            if of_transformers(cast(Any, type(part)).save_pretrained):
                part.__dict__["save_pretrained"] = save or MethodType(save_whole, part)
    return whole


def _groups(model: nn.Module, ctx: ParallelContext, stages: int) -> Callable[[Cut], Comm]:
    """The ranks of each: tp, or with stages both axes for the vocabulary, which belongs to no stage."""
    tp = ctx.comm("tp")
    if stages == 1:
        return lambda cut: tp
    owner, name = find_layers(model)
    in_layers = set(owner.get_submodule(name).modules())
    both, ends = ctx.comm("pp", "tp"), (styles.EMBEDDING_ROW, styles.COLUMN_GATHERED)
    return lambda cut: both if cut.style in ends and cut.module not in in_layers else tp
