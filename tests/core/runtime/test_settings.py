"""Environment variables: what unset, empty and wrong values give, and what children inherit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import programs as forked

from tpcore import settings

WRONG = [
    (settings.TIMEOUT, "soon", "TPCORE_TIMEOUT must be a positive number of seconds, not 'soon'"),
    (settings.TIMEOUT, "-1", "TPCORE_TIMEOUT must be a positive number of seconds, not '-1'"),
    (settings.TIMEOUT, "nan", "TPCORE_TIMEOUT must be a positive number of seconds, not 'nan'"),
    (settings.CHECK, "yes", "TPCORE_CHECK must be one of 1, always, 0, off, warmup, not 'yes'"),
    (settings.RANK, "-1", "RANK must be a whole number, not '-1'"),
    (settings.MASTER_PORT, "http", "MASTER_PORT must be a port, at most 65535, not 'http'"),
    (settings.MASTER_PORT, "65536", "MASTER_PORT must be a port, at most 65535, not '65536'"),
]


@pytest.mark.parametrize(("variable", "text", "message"), WRONG, ids=lambda v: getattr(v, "name", None))
def test_a_wrong_value_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: settings.Variable[object], text: str, message: str
) -> None:
    monkeypatch.setenv(variable.name, text)
    with pytest.raises(ValueError, match=f"^{message}$"):
        variable.get()


def test_unset_and_empty_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPCORE_TIMEOUT", raising=False)
    assert (settings.TIMEOUT.get(), settings.TIMEOUT.is_set) == (120.0, False)
    monkeypatch.setenv("TPCORE_TIMEOUT", "")
    assert (settings.TIMEOUT.get(), settings.TIMEOUT.is_set) == (120.0, False)
    monkeypatch.setenv("TPCORE_TIMEOUT", "2.5")
    assert (settings.TIMEOUT.get(), settings.TIMEOUT.is_set) == (2.5, True)


OWN = {"GROUP_NAME": "a", "ROLE_ARN": "b", "MASTER_KEY": "c", "TORCHELASTIC_ENABLE_FILE_TIMER": "0", "PYTHONPATH": "d"}


@pytest.mark.parametrize("launcher", [{}, {"TORCHELASTIC_RUN_ID": "1"}], ids=["by hand", "torchrun"])
def test_a_child_does_not_inherit_which_rank_its_parent_is(
    monkeypatch: pytest.MonkeyPatch, launcher: dict[str, str]
) -> None:
    before, named = settings.inherited(), {"ROLE_NAME": "torchrun's, if that is there"}
    ours = dict.fromkeys(("RANK", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE", "TPCORE_STORE"), "1")
    for name, value in (OWN | named | ours | launcher).items():
        monkeypatch.setenv(name, value)
    assert settings.inherited() == before | OWN | ({} if launcher else named)


@pytest.mark.slow
def test_all_that_torchrun_sets_is_known(tmp_path: Path) -> None:
    show = "import os, json; from tpcore import settings; print(json.dumps([dict(os.environ), settings.inherited()]))"
    (tmp_path / "show.py").write_text(show)
    before = settings.inherited() | OWN
    environment, inherited = json.loads(forked.run(["torchrun", "--standalone", "show.py"], tmp_path, before).stdout)
    # a default of torchrun's for NCCL is one for its children too
    assert inherited == {**before, "TORCH_NCCL_ASYNC_ERROR_HANDLING": environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"]}


def test_a_changed_environment_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "green")
    before = settings.environment()
    with settings.changed({"COLOUR": "red", "SHAPE": "round"}):
        assert settings.environment()["COLOUR"] == "red"
        settings.update({"SIZE": "large"})
        with settings.changed({"SIZE": "small"}):
            pass
        assert settings.environment()["SIZE"] == "large"
    settings.restore(before)
    assert settings.environment() == before
