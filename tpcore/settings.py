"""The environment variables that tpcore reads, beside those that backends declare. No other module touches the
environment; ``docs/environment.md`` says of every variable what it means, its values, and who sets it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

__version__ = "0.1.0"

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. An empty value counts as unset."""

    name: str
    parse: Callable[[str], T]
    """Raises a ValueError whose text is what the value must be: "a whole number"."""
    default: T

    def text(self) -> str:
        """The value as it stands in the environment; empty if unset."""
        return os.environ.get(self.name, "")

    @property
    def is_set(self) -> bool:
        return bool(self.text())

    def get(self) -> T:
        """The parsed value. ValueError names the variable and the value."""
        text = self.text()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as e:
            raise ValueError(f"{self.name} must be {e}, not {text!r}") from None


# -- how values are written ---------------------------------------------------------------------------------
def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError("a positive number of seconds")
    return value


def whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("a whole number")
    return int(text)


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError("a port, at most 65535")
    return int(text)


def one_of(values: Mapping[str, T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        if text not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return values[text]

    return parse


# -- what a person sets -------------------------------------------------------------------------------------
BACKEND = Variable("TPCORE_BACKEND", str, "")
TIMEOUT = Variable("TPCORE_TIMEOUT", seconds, 120.0)
CHECK: Variable[str] = Variable(
    "TPCORE_CHECK", one_of({"1": "always", "always": "always", "0": "off", "off": "off", "warmup": "warmup"}), "warmup"
)
THREADS = Variable("OMP_NUM_THREADS", whole, 1)
HUGE_PAGES = Variable("THP_MEM_ALLOC_ENABLE", one_of({"1": True, "0": False}), False)

# -- what a launcher sets -----------------------------------------------------------------------------------
RANK = Variable("RANK", whole, 0)
WORLD_SIZE = Variable("WORLD_SIZE", whole, 1)
LOCAL_RANK = Variable("LOCAL_RANK", whole, 0)
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", whole, 1)
MASTER_ADDR = Variable("MASTER_ADDR", str, "")
MASTER_PORT = Variable("MASTER_PORT", port, 0)
AGENT_STORE = Variable("TORCHELASTIC_USE_AGENT_STORE", "True".__eq__, False)
# of other launchers, which know no WORLD_SIZE
OPENMPI_SIZE = Variable("OMPI_COMM_WORLD_SIZE", whole, 1)
MPICH_SIZE = Variable("PMI_SIZE", whole, 1)
SLURM_SIZE = Variable("SLURM_NTASKS", whole, 1)
RUN_ID = Variable("TORCHELASTIC_RUN_ID", str, "")
SLURM_JOB = Variable("SLURM_JOB_ID", str, "")
SLURM_HET = Variable("SLURM_HET_SIZE", str, "")
TEST = Variable("PYTEST_CURRENT_TEST", str, "")

# -- what tpcore sets for the processes that it starts ------------------------------------------------------
STORE = Variable("TPCORE_STORE", str, "")

_JOB = {v.name for v in (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, AGENT_STORE, STORE)}
_TORCHRUN = {
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *(f"TORCHELASTIC_{name}" for name in ("RUN_ID", "RESTART_COUNT", "MAX_RESTARTS", "ERROR_FILE", "TIMER_FILE")),
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
}
"""What torchrun sets beside those, and nothing else: ROLE_ARN is a user's own, and without torchrun ROLE_NAME too."""


# -- environments of processes ------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def inherited() -> dict[str, str]:
    """The environment for a child process: this process's, without the variables of its job and rank."""
    theirs = _JOB | _TORCHRUN if RUN_ID.is_set else _JOB
    return {k: v for k, v in os.environ.items() if k not in theirs}


def of_rank(rank: int, size: int) -> dict[str, str]:
    """The variables that a launcher sets for one of ``size`` ranks, all on this host."""
    values = ((RANK, rank), (WORLD_SIZE, size), (LOCAL_RANK, rank), (LOCAL_WORLD_SIZE, size))
    return {variable.name: str(value) for variable, value in values}


def update(variables: Mapping[str, str]) -> None:
    """Set variables for libraries that read the environment themselves. Call it before they do."""
    os.environ.update(variables)


def restore(before: Mapping[str, str]) -> None:
    """Restore the environment that ``environment()`` returned."""
    for name in [k for k in os.environ if k not in before]:
        del os.environ[name]
    os.environ.update(before)


@contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` inside the block; restore the old values after it."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)
