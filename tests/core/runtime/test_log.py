"""One channel for messages to the person who runs a job, and whose configuration of it wins."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from helpers import programs as forked

from tpcore import log as channel

PROGRAM = """
import logging, sys
{before}
from tpcore.log import inform, log
{after}
inform("it goes well")
log.warning("take care")
"""
DEFAULT = "tpcore: it goes well\ntpcore: take care\n"


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        ("", "", DEFAULT),
        ("logging.basicConfig()", "", "WARNING:tpcore:take care\n"),
        ("", "logging.basicConfig(level='INFO')", "INFO:tpcore:it goes well\nWARNING:tpcore:take care\n"),
        ("logging.getLogger('tpcore').setLevel('ERROR')", "", ""),
        ("logging.getLogger('tpcore').setLevel('INFO')", "", DEFAULT),
        ("", "log.addHandler(logging.NullHandler())", ""),
        ("", "logging.basicConfig(level='INFO'); log.propagate = False", DEFAULT),
        ("", "sys.stderr = sys.stdout", DEFAULT),
    ],
    ids=["default", "root", "root_later", "level", "info", "handler", "apart", "redirected"],
)
def test_the_programs_own_logging_wins_and_nothing_is_printed_twice(
    before: str, after: str, printed: str, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(before=before, after=after))
    done = forked.run(["python", "program.py"], tmp_path)
    assert (done.stderr + done.stdout, done.returncode) == (printed, 0)


def test_a_line_waits_while_something_else_owns_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's excepthook does, which puts the rank before every line that is printed meanwhile."""
    printed: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            printed.append(text)

    monkeypatch.setattr(channel, "_configured", lambda: False)  # pytest has handlers on the root
    monkeypatch.setattr(sys, "stderr", Stream())
    other = threading.Thread(target=channel.log.error, args=("rank 1 is gone",))
    with channel.hold_lines():
        sys.stderr.write("the traceback")
        other.start()
        other.join(0.2)  # it would be done by then
        assert printed == ["the traceback"]
    other.join()
    assert printed == ["the traceback", "tpcore: rank 1 is gone\n"]
