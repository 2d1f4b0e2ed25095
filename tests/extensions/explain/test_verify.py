"""``tpcore verify`` in this process: backends that cannot run, and faults that it shows on a user's machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import Plain
from helpers.tiers import tiers
from test_mutants import SHOWN
from typer.testing import CliRunner

from tpcore import Mesh, ParallelContext
from tpcore.cli.app import app
from tpcore.testing import run_ranks
from tpcore_explain.verify.report import EDGES, edge_rows


@pytest.mark.parametrize("name", ["nope", "neuron"])
def test_verifying_a_backend_that_cannot_run_starts_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["verify", "--backend", name])
    assert found.exit_code == 2
    assert found.output.startswith("tpcore verify: ")
    assert "Traceback" not in found.output
    assert not list(tmp_path.iterdir())


# two ranks make no all-to-all of a sum in order
SHOWN_BY_VERIFY = sorted({*EDGES} & SHOWN.keys() - {"test_in_order"})


@pytest.mark.parametrize("test", tiers(["test_overlap"], slow=SHOWN_BY_VERIFY))
def test_a_users_machine_shows_the_fault(test: str) -> None:
    def shows(ctx: ParallelContext) -> bool:
        try:
            return any(row.wrong for row in edge_rows(ctx, [test]))
        except RuntimeError:  # in place of a wrong number: a result whose memory cannot be written, say
            return True

    assert any(run_ranks(Mesh({"tp": 2}), shows, backend=SHOWN[test][1]))


@pytest.mark.slow
def test_verify_finds_nothing_wrong_at_the_edges_of_what_is_right() -> None:
    found = run_ranks(Mesh({"tp": 2}), lambda ctx: [row.wrong for row in edge_rows(ctx)], backend=Plain)
    assert found == [[[]] * len(EDGES)] * 2
