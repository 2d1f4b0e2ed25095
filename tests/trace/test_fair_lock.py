"""The lock that gives calls their order."""

from __future__ import annotations

import threading

import pytest

from tpcore.trace.serve.fair_lock import FairLock


def test_turns_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    turn = FairLock()
    order: list[int] = []

    def take(n: int) -> None:
        with turn:
            order.append(n)

    threads = [threading.Thread(target=take, args=(n,)) for n in range(20)]
    with turn:
        for n, thread in enumerate(threads):
            thread.start()
            while len(turn._waiting) <= n:  # until it is in the queue
                pass
    for thread in threads:
        thread.join(60)
    assert order == list(range(20))
    with turn:
        pass


@pytest.mark.parametrize("given", [False, True])
def test_a_turn_that_is_interrupted_is_the_next_ones(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the wait, and in the moment in which the turn was given."""
    turn = FairLock()

    class Interrupted:
        taken = False

        def acquire(self) -> None:
            if self.taken:
                if given:
                    turn.__exit__()  # of the one whose turn it was
                raise KeyboardInterrupt
            self.taken = True

        def release(self) -> None:
            pass

    monkeypatch.setattr("tpcore.trace.serve.fair_lock.Lock", Interrupted)
    turn.__enter__()
    with pytest.raises(KeyboardInterrupt):
        turn.__enter__()
    if not given:
        turn.__exit__()
    with turn:  # or it would be asked for as above
        assert not turn._waiting
