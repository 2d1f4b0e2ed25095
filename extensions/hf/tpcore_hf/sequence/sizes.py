"""What each way of context parallelism sends and keeps, and the choice that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from tpcore.layers.context_parallel import LARGEST_MASK, Way

from ..plan.heads import key_value_width


def mib(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB"


@dataclass(frozen=True)
class AttentionSizes:
    """Of one rank of ``cp`` and ``tp``; counts are of bytes, for one sequence."""

    heads: int
    keys: int
    head_dim: int
    hidden: int
    itemsize: int
    cp: int
    tp: int

    @classmethod
    def of(cls, model: Any, cp: int, tp: int) -> AttentionSizes:
        config = model.config
        heads, hidden = config.num_attention_heads, config.hidden_size
        keys = 1 if getattr(config, "multi_query", False) else getattr(config, "num_key_value_heads", None) or heads
        return cls(heads // tp, max(keys // tp, 1), key_value_width(config) // 2, hidden, model.dtype.itemsize, cp, tp)

    def sent(self, way: Way, tokens: int) -> int:
        """What a rank sends in forward and backward."""
        n, wide = self.cp, max(self.itemsize, 4)  # the ring's gradients travel as sums of many
        exchanged = self.heads if self.keys % n else self.keys
        heads = {
            "gather": 4 * (n - 1) * self.keys * self.itemsize,
            "ulysses": 4 * (n - 1) * (self.heads + exchanged) * self.itemsize // n,
            "ring": (4 * (n - 1) * self.itemsize + 2 * n * wide) * self.keys,
        }[way]
        return heads * self.head_dim * tokens // n

    def kept(self, way: Way, tokens: int, masked: bool = True) -> int:
        """What a rank keeps for backward: scaled_dot_product_attention keeps keys for each query head, and the mask
        unless that is large. Not ``masked``: tokens see all earlier ones, which takes no mask where a rank has all
        queries."""
        local = tokens // self.cp
        heads = {
            "gather": 2 * (local + tokens) * self.heads,
            "ulysses": 4 * local * self.heads,
            "ring": 2 * local * (self.heads + self.keys),
        }[way]
        pairs = self.pairs(way, tokens) if masked or (way == "gather" and self.cp > 1) else 0
        return (heads * self.head_dim + (pairs if pairs <= LARGEST_MASK else 0)) * self.itemsize

    def pairs(self, way: Way, tokens: int) -> int:
        """Of queries and keys, in the mask of an attention."""
        return {"gather": tokens // self.cp * tokens, "ulysses": tokens * tokens, "ring": 0}[way]

    def rest(self, tokens: int) -> int:
        """What the rest of a layer keeps, in 16 bits ``(10 + 24 / tp)`` bytes per token and hidden feature: Korthikanti
        et al. 2022, arXiv:2205.05198, equation 2."""
        return round((10 + 24 / self.tp) / 2 * self.hidden * self.itemsize) * (tokens // self.cp)

    @property
    def ways(self) -> list[Way]:
        return [w for w in get_args(Way) if w != "ulysses" or self.heads % self.cp == 0]

    def costs(self, way: Way, tokens: int, masked: bool, layers: int) -> str:
        """In words, of ``way`` and of the layers around it."""
        kept, rest = self.kept(way, tokens, masked), self.rest(tokens)
        others = [
            f"{w!r} would send {mib(self.sent(w, tokens))} and keep {mib(self.kept(w, tokens, masked))}"
            for w in self.ways
            if w != way
        ]
        return (
            f"{way!r} for {tokens} tokens over cp={self.cp}: for each sequence an attention sends "
            f"{mib(self.sent(way, tokens))} and keeps {mib(kept)} for backward, the rest of its layer keeps about "
            f"{mib(rest)}; {layers} layers keep about {mib(layers * (kept + rest))}; {', '.join(others)}"
        )

    def choose(self, tokens: int) -> tuple[Way, str]:
        """The way that sends the fewest bytes of those that keep no more than the rest of a layer; and why."""
        ways, limit = self.ways, self.rest(tokens)
        # a mask too large to keep counts, too: it takes time, for keys that are hidden, and again in backward
        most = {w: self.kept(w, tokens) + max(self.pairs(w, tokens) - LARGEST_MASK, 0) * self.itemsize for w in ways}
        fit = [w for w in ways if w == "ring" or most[w] <= limit]
        best = min(fit, key=lambda way: self.sent(way, tokens))
        costs = ", ".join(f"{w} {mib(self.sent(w, tokens))} and {mib(self.kept(w, tokens))}" for w in ways)
        return best, (
            f"context_parallel='auto' is {best!r} for {tokens} tokens over cp={self.cp}: an attention sends and keeps "
            f"for each sequence {costs}, and the rest of its layer keeps about {mib(limit)}"
        )
