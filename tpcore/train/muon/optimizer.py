"""An optimizer with Muon's update for matrices and AdamW's for all else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..parameters import check_parameters, named_of, names_of
from ..zero.chunk import chunk_of
from .matrices import Home, NewtonSchulz, home_of

MUON, BLOCKS, ADAMW = RULES = ("muon", "blocks", "adamw")
RuleOf = Callable[[str, Tensor], str | None]

_TABLES = ("wte", "wpe", "shared", "lm_head", "head", "score", "classifier", "qa_outputs", "proj_out")
_SCALES = {
    "original": lambda rows, columns: sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * sqrt(max(rows, columns)),
}


def default_rule(name: str, p: Tensor) -> str:
    """By the name, which is the same on every mesh, as a parameter does not know its module."""
    words = name.split(".")
    if any("embed" in word or word in _TABLES for word in words) or "bias" in words[-1] or words[-1] == "A_log":
        return ADAMW
    return MUON if p.ndim == 2 or (p.ndim == 3 and any("expert" in word for word in words)) else ADAMW


class Muon(torch.optim.Optimizer):
    """Muon for matrices and AdamW for all else, on any mesh: the steps of ``torch.optim.Muon`` on the whole matrices.

    A matrix whose parts are on several ranks is put together on one of them, its owner, orthogonalized once, and sent
    back in parts; what several ranks hold alike is dealt out to them. Matrices of one shape and layout are dealt out
    evenly, so that owners have equal work. A fused weight (q, k and v, or gate and up) is one matrix, in the form that
    files have; of a stack of experts each is one. The momentum is sharded as its parameter is, and a checkpoint opens
    on any mesh. ``Zero1(Muon, model.named_parameters(), lr=...)`` keeps 1/dp of all state on each rank. Step by
    ``tpcore.optimizer_step``; ``step`` is collective over dp, ep, cp and tp.

    Args:
        params: ``model.named_parameters()``, or groups of such pairs. Each group becomes one for each rule, with a lr
            of its own, which schedulers scale; ``{"params": ..., "rule": "adamw"}`` names its own.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``.
        ns_dtype: of the orthogonalization, and of what is sent.
        rule: of a name and a parameter: "muon", "adamw", "blocks" (Muon of this rank's part as it is, without
            collectives over tp: another result on each mesh), or None for the default: Muon for matrices, and for
            stacks of them with "expert" in the name; AdamW for all else, and by their names for embeddings, heads and
            biases ("embed" in it, ``wte``, ``wpe``, ``shared``, ``lm_head``, ``head``, ``score``, ``classifier``,
            ``qa_outputs``, ``proj_out``).
        adamw: options of ``torch.optim.AdamW``; its lr is ``lr`` if they have none.

    Raises:
        ValueError: for parameters without names and rule, and for matrices whose parts cannot be put together.
    """

    tpcore_steps_parts = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        rule: RuleOf | None = None,
        adamw: dict[str, Any] | None = None,
    ) -> None:
        self._rule = rule
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        nothing = nn.Parameter(torch.empty(0, device="cpu"))
        of_adamw = torch.optim.AdamW([nothing], **{"lr": lr, **(adamw or {})}).defaults
        self._options = {MUON: muon, BLOCKS: muon, ADAMW: of_adamw}
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        params, names = named_of(param_group)
        for name, p in zip(names, params, strict=True):
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"parameter {name} is a {type(p).__name__} and no tensor: pass model.named_parameters()"
                )
        if "rule" in param_group:
            self._add(param_group, params, names)
            return
        known = param_group.get("param_names") or [i[0] for i in param_group["params"] if isinstance(i, tuple)]
        if len(known) < len(params) or not all(isinstance(name, str) for name in known):
            raise ValueError(
                f"parameters {', '.join(names[:5])} have no names, by which Muon is chosen for matrices and AdamW for "
                'embeddings and heads: pass model.named_parameters(), or groups {"params": ..., "rule": "adamw"}'
            )
        if any(chunk_of(p) is not None for p in params):
            raise ValueError('a group that is added to a Zero1 of Muon says its rule: {"params": ..., "rule": "muon"}')
        rules = [
            (self._rule and self._rule(name, p)) or default_rule(name, p) for name, p in zip(known, params, strict=True)
        ]
        # also groups without parameters: a stage of a pipeline has as many groups as the others
        for rule in sorted({MUON, ADAMW, *rules, *(RULES if self._rule else ())}, key=lambda r: (*RULES, r).index(r)):
            chosen = [i for i, of in enumerate(rules) if of == rule]
            group = {**param_group, "params": [params[i] for i in chosen], "param_names": [known[i] for i in chosen]}
            self._add({**group, "rule": rule}, group["params"], [repr(known[i]) for i in chosen])

    def _add(self, group: dict[str, Any], params: list[Tensor], names: list[str]) -> None:
        rule = group["rule"]
        if rule not in RULES:
            raise ValueError(f"parameters {', '.join(names[:5])} have the rule {rule!r}: there are {', '.join(RULES)}")
        for key, value in self._options[rule].items():
            group.setdefault(key, value)
        if rule != ADAMW:
            _check_options(group)
            for name, p in zip(names, params, strict=True):
                shape = tuple(p.shape if (chunk := chunk_of(p)) is None else chunk.parameter.shape)
                if len(shape) not in (2, 3):
                    raise ValueError(
                        f"parameter {name} of shape {shape} is no matrix and no stack of matrices, which Muon "
                        f'orthogonalizes: give it the rule "{ADAMW}"'
                    )
        if not any(chunk_of(p) is not None for p in params):
            check_parameters(params, names)
        super().add_param_group(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        at_home: dict[tuple[Home, NewtonSchulz], list[tuple[Tensor, Tensor, dict[str, Any]]]] = defaultdict(list)
        numbered = iter(names_of(self.param_groups))
        for group in self.param_groups:
            names = [next(numbered) for _ in group["params"]]
            for name, p in zip(names, group["params"], strict=True) if group["rule"] != ADAMW else ():
                if p.grad is not None:
                    by = NewtonSchulz(
                        tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"], group["ns_dtype"]
                    )
                    home = home_of(p, name, blocks=group["rule"] == BLOCKS)
                    at_home[home, by].append((p, self._momentum(p, group), group))
        for (home, by), items in at_home.items():
            updates = home.orthogonalized([momentum for _, momentum, _ in items], by)
            for (p, _, group), update in zip(items, updates, strict=True):
                lr, scale = float(group["lr"]), _SCALES[group["adjust_lr_fn"] or "original"](*home.spec.shape)
                p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * scale)
        self._step_others()
        return loss

    def _momentum(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """The update before it is orthogonalized."""
        grad, momentum = p.grad, group["momentum"]
        if grad is None or grad.is_sparse or grad.is_complex():
            raise ValueError(f'Muon orthogonalizes dense real gradients: give {tuple(p.shape)} the rule "{ADAMW}"')
        if "momentum_buffer" not in self.state[p]:
            self.state[p]["momentum_buffer"] = torch.zeros_like(grad)
        buffer: Tensor = self.state[p]["momentum_buffer"].lerp_(grad, 1 - momentum)
        return grad.lerp(buffer, momentum) if group["nesterov"] else buffer

    def _step_others(self) -> None:
        """By torch's own AdamW, over the groups and the state of this optimizer."""
        adamw = torch.optim.AdamW([nn.Parameter(torch.empty(0, device="cpu"))])
        adamw.param_groups = [group for group in self.param_groups if group["rule"] == ADAMW and group["params"]]
        adamw.state = self.state
        adamw.step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """ValueError for the state of another optimizer, and of one whose parameters had other rules."""
        saved = [group.get("rule") for group in state_dict["param_groups"]]
        rules = [group["rule"] for group in self.param_groups]
        if [rule == ADAMW for rule in saved] != [rule == ADAMW for rule in rules] or None in saved:
            raise ValueError(
                f"the groups that are loaded have the rules {saved}, and this Muon's have {rules}: make it of the same "
                "groups with the same rule= as the one that was saved"
            )
        super().load_state_dict(state_dict)


def _check_options(group: dict[str, Any]) -> None:
    for key in ("lr", "weight_decay", "momentum", "eps"):
        if not group[key] >= 0:
            raise ValueError(f"{key} must be 0 or more, not {group[key]}")
    if len(group["ns_coefficients"]) != 3 or not 0 <= group["ns_steps"] < 100:
        raise ValueError(
            f"ns_coefficients={group['ns_coefficients']}, ns_steps={group['ns_steps']}: the iteration takes three "
            "numbers and fewer than 100 steps"
        )
    if group["adjust_lr_fn"] not in (None, *_SCALES):
        raise ValueError(f"adjust_lr_fn must be None or one of {', '.join(_SCALES)}, not {group['adjust_lr_fn']!r}")
    if not group["ns_dtype"].is_floating_point:
        raise ValueError(f"ns_dtype must be a floating dtype, not {group['ns_dtype']}")
