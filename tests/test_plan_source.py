"""What is read off the source of a forward: where in doubt, the answer is the one that is always right."""

from __future__ import annotations

from typing import Any

from tpcore.models.source import argument_of_calls, asks_loss_function, calls_super


class Plain:
    def forward(self: Any, x: Any) -> Any:
        return self.down(self.gate(x) * self.up(x)).view(x.shape)


class Residual:
    def forward(self: Any, x: Any) -> Any:
        return self.down(self.gate(x) * self.up(x)) + x


class Changed:
    def forward(self: Any, x: Any) -> Any:
        x = x * 2
        return self.down(self.gate(x) * self.up(x))


class Other:
    def forward(self: Any, x: Any, y: Any) -> Any:
        return self.down(self.gate(x) * self.up(y))


def test_an_input_is_shared_where_nothing_else_reads_it() -> None:
    children = {"gate", "up"}
    assert argument_of_calls(Plain.forward, children) == "x"
    for kind in (Residual, Changed, Other):
        assert argument_of_calls(kind.forward, children) is None
    assert argument_of_calls(Plain.forward, {"gate", "up", "more"}) is None


class Causal:
    def forward(self: Any, x: Any, labels: Any) -> Any:
        logits = self.lm_head(x) / self.scale
        loss = self.loss_function(logits, labels)
        return self.CausalLMOutput(loss=loss, logits=logits)


class Masked:
    def forward(self: Any, x: Any, labels: Any) -> Any:
        logits = self.lm_head(x)
        logits[:, :, self.image_tokens] = 0
        return self.loss_function(logits, labels)


def test_a_loss_of_parts_only_where_logits_are_not_looked_at() -> None:
    assert asks_loss_function(Causal.forward)
    assert not asks_loss_function(Masked.forward)
    assert not asks_loss_function(Plain.forward)


def test_super() -> None:
    class Scaled(Plain):
        def forward(self: Any, x: Any) -> Any:
            return super().forward(x) * 2

    assert calls_super(Scaled.forward)
    assert not calls_super(Plain.forward)
