"""What transformers has under private names alone and several modules read, or that differs between its releases."""

from __future__ import annotations

from typing import Any

ATTENTION = "_attn_implementation"
"""The field of a configuration with the name of the function that computes attention."""
EXPERTS = "_experts_implementation"
"""That of experts; a configuration without experts may have none. The public setter is a model's."""
PASSES_OTHERS = "_is_expert_parallel"
"""Of experts that pass by the numbers of others: releases before 5.23 have none."""


def of_transformers(part: Any) -> bool:
    """Whether a class or a function is transformers' own: a user's may derive from any of them, so that the name of its
    module is all that tells."""
    return str(getattr(part, "__module__", "")).startswith("transformers.")


def set_experts(config: Any, name: str) -> None:
    if hasattr(config, EXPERTS):
        setattr(config, EXPERTS, name)


def set_wake_up(manager: Any, event: Any) -> None:
    """Let the loop of ``manager`` wait for ``event`` where there are no requests. Its name changed with 5.23."""
    setattr(manager, "_wake_up_loop" if hasattr(manager, "_wake_up_loop") else "_has_new_requests", event)
