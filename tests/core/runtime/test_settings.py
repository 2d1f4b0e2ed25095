"""Environment variables: what unset, empty and wrong values give, and what children inherit."""

from __future__ import annotations

import pytest

from tpcore import settings

WRONG = [
    (settings.TIMEOUT, "soon", "TPCORE_TIMEOUT must be a positive number of seconds, not 'soon'"),
    (settings.TIMEOUT, "-1", "TPCORE_TIMEOUT must be a positive number of seconds, not '-1'"),
    (settings.TIMEOUT, "nan", "TPCORE_TIMEOUT must be a positive number of seconds, not 'nan'"),
    (settings.CHECK, "yes", "TPCORE_CHECK must be one of 1, always, 0, off, warmup, not 'yes'"),
    (settings.RANK, "-1", "RANK must be a whole number, not '-1'"),
    (settings.MASTER_PORT, "http", "MASTER_PORT must be a whole number, not 'http'"),
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


def test_a_child_does_not_inherit_which_rank_its_parent_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TPCORE_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TPCORE_CHECK", "warmup")
    inherited = settings.inherited()
    assert inherited["TPCORE_CHECK"] == "warmup"
    assert not inherited.keys() & {"RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TPCORE_STORE"}


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
