"""The environment variables that tpcore reads, beside those that backends declare. No other module touches the
environment; ``docs/environment.md`` lists every variable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

__version__ = "0.1.0"

T = TypeVar("T")
SetBy = Literal["you", "launcher", "tpcore"]


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. An empty value counts as unset."""

    name: str
    parse: Callable[[str], T]
    """Raises a ValueError whose text is what the value must be: "a whole number"."""
    default: T
    values: str
    meaning: str
    set_by: SetBy = "you"

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


def one_of(values: Mapping[str, T]) -> Callable[[str], T]:
    def parse(text: str) -> T:
        if text not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return values[text]

    return parse


def _text(name: str, values: str, meaning: str, set_by: SetBy = "launcher") -> Variable[str]:
    return Variable(name, str, "", values, meaning, set_by)


def _count(name: str, meaning: str, default: int = 1, values: str = "a number") -> Variable[int]:
    return Variable(name, whole, default, values, meaning, "launcher")


# -- what a person sets -------------------------------------------------------------------------------------
BACKEND = _text(
    "TPCORE_BACKEND",
    "a backend's name",
    "The backend for `init(backend=None)`. Default: `neuron` or `cuda` where it can run, else `cpu_gloo`.",
    "you",
)
_WAITS = "How long a collective waits for a rank that does not come."
TIMEOUT = Variable("TPCORE_TIMEOUT", seconds, 120.0, "seconds, default `120`", _WAITS)
CHECK: Variable[str] = Variable(
    "TPCORE_CHECK",
    one_of({"1": "always", "always": "always", "0": "off", "off": "off", "warmup": "warmup"}),
    "warmup",
    "`warmup` (default), `1` or `always`, `0` or `off`",
    "Which collectives ranks compare before these run: the first 512 of each group, all, or none. `always` also "
    "finds parts used as wholes and tp ranks with different data; over torch_xla, reads of values inside a step. "
    "See [When something goes wrong](debugging.md#checked-collectives).",
)
THREADS = Variable(
    "OMP_NUM_THREADS",
    whole,
    1,
    "a number, default `1` in processes that `tpcore.launch` starts",
    "Number of torch's threads in each process.",
)
HUGE_PAGES = Variable(
    "THP_MEM_ALLOC_ENABLE",
    one_of({"1": True, "0": False}),
    False,
    "`0` or `1`, default `1` in processes that serve",
    "torch's: huge pages for tensors of 2 MiB or more. At `1` a traced model's ranks have copies of their parts "
    "of the weights in huge pages, at `0` they map the files.",
)

# -- what a launcher sets -----------------------------------------------------------------------------------
RANK = _count("RANK", "This process's rank in the job.", 0, "0 to `WORLD_SIZE` - 1")
WORLD_SIZE = _count("WORLD_SIZE", "Number of processes of the job. Unset: one process.")
LOCAL_RANK = _count("LOCAL_RANK", "This process's rank on its host: selects its device.", 0)
LOCAL_WORLD_SIZE = _count("LOCAL_WORLD_SIZE", "Number of the job's processes on this host.")
MASTER_ADDR = _text("MASTER_ADDR", "a host", "Host of the job's store.")
MASTER_PORT = _count("MASTER_PORT", "Port of the job's store.", 0, "a port")
_HOSTED = "The launcher hosts the job's store, not rank 0."
AGENT_STORE = Variable("TORCHELASTIC_USE_AGENT_STORE", "True".__eq__, False, "`True`", _HOSTED, "launcher")
# of other launchers, which know no WORLD_SIZE
OPENMPI_SIZE = _count("OMPI_COMM_WORLD_SIZE", "As `WORLD_SIZE`, for the conformance kit.")
MPICH_SIZE = _count("PMI_SIZE", "The same.")
SLURM_SIZE = _count("SLURM_NTASKS", "The same.")
RUN_ID = _text("TORCHELASTIC_RUN_ID", "an id", "Names the job: ranks of two jobs do not meet.")
SLURM_JOB = _text("SLURM_JOB_ID", "an id", "The same.")
SLURM_HET = _text("SLURM_HET_SIZE", "a number", "Set: the job's parts have ids of their own.")
TEST = _text("PYTEST_CURRENT_TEST", "a test's name", "Names the test that ends a job of the kit.")

# -- what tpcore sets for the processes that it starts ------------------------------------------------------
_FOUND = "The file by which the processes of a traced model find each other, instead of a port."
STORE = _text("TPCORE_STORE", "a path", _FOUND, "tpcore")

LAUNCHER = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
"""Prefixes of variables that this process's launcher may have set and that its children must not inherit."""


# -- environments of processes ------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def inherited() -> dict[str, str]:
    """The environment for a child process: this process's, without the variables of its job and rank."""
    own = {v.name for v in (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, STORE)}
    return {k: v for k, v in os.environ.items() if k not in own and not k.startswith(LAUNCHER)}


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
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
