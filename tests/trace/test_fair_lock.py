"""The lock that gives calls their order."""

from __future__ import annotations

import threading

import pytest

from tpcore.trace.serve.model import Turn


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turn = Turn()
    order: list[int] = []

    def take(n: int) -> None:
        with turn:
            order.append(n)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(20)]
    with turn:
        for n, thread in enumerate(threads):
            thread.start()
            while len(turn._waiting) <= n + 1:  # until it is in the queue, behind this one
                pass
    for thread in threads:
        thread.join(60)
    assert order == list(range(20))
    with turn:
        pass


@pytest.mark.parametrize("given", [False, True])
def test_a_turn_that_is_interrupted_is_the_next_ones(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait, and in the moment in which the turn was given."""
    turn = Turn()

    def interrupted(predicate: object) -> None:
        if given:
            turn.__exit__()  # of the one whose turn it was
        raise KeyboardInterrupt

    turn.__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(turn._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            turn.__enter__()
    if not given:
        turn.__exit__()
    assert not turn._waiting
    with turn:
        pass
