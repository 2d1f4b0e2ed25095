"""The environment variables that tpcore reads. No other module touches the environment.

A backend declares its own variables with ``Variable`` too. ``docs/environment.md`` lists every one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

__version__ = "0.1.0"

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. An empty value counts as unset."""

    name: str
    parse: Callable[[str], T]
    """Raises a ValueError whose text is what the value must be: "a whole number"."""
    default: T
    values: str
    meaning: str
    set_by: Literal["you", "launcher", "tpcore"] = "you"

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
    wrong = ValueError("a positive number of seconds")
    try:
        value = float(text)
    except ValueError:
        raise wrong from None
    if not value > 0:
        raise wrong
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


# -- what a person sets -------------------------------------------------------------------------------------
BACKEND = Variable(
    "TPCORE_BACKEND",
    str,
    "",
    "a backend's name",
    "The backend for `init(backend=None)`. Default: `neuron` or `cuda` where it can run, else `cpu_gloo`.",
)
TIMEOUT = Variable(
    "TPCORE_TIMEOUT",
    seconds,
    120.0,
    "seconds, default `120`",
    "How long a collective waits for a rank that does not come.",
)
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
RANK = Variable("RANK", whole, 0, "0 to `WORLD_SIZE` - 1", "This process's rank in the job.", "launcher")
WORLD_SIZE = Variable(
    "WORLD_SIZE", whole, 1, "a number", "Number of processes of the job. Unset: one process.", "launcher"
)
LOCAL_RANK = Variable(
    "LOCAL_RANK", whole, 0, "a number", "This process's rank on its host: selects its device.", "launcher"
)
LOCAL_WORLD_SIZE = Variable(
    "LOCAL_WORLD_SIZE", whole, 1, "a number", "Number of the job's processes on this host.", "launcher"
)
MASTER_ADDR = Variable("MASTER_ADDR", str, "", "a host", "Host of the job's store.", "launcher")
MASTER_PORT = Variable("MASTER_PORT", whole, 0, "a port", "Port of the job's store.", "launcher")
AGENT_STORE = Variable(
    "TORCHELASTIC_USE_AGENT_STORE",
    "True".__eq__,
    False,
    "`True`",
    "The launcher hosts the job's store, not rank 0.",
    "launcher",
)
# of other launchers, which know no WORLD_SIZE
OPENMPI_SIZE = Variable(
    "OMPI_COMM_WORLD_SIZE", whole, 1, "a number", "As `WORLD_SIZE`, for the conformance kit.", "launcher"
)
MPICH_SIZE = Variable("PMI_SIZE", whole, 1, "a number", "The same.", "launcher")
SLURM_SIZE = Variable("SLURM_NTASKS", whole, 1, "a number", "The same.", "launcher")
RUN_ID = Variable("TORCHELASTIC_RUN_ID", str, "", "an id", "Names the job: ranks of two jobs do not meet.", "launcher")
SLURM_JOB = Variable("SLURM_JOB_ID", str, "", "an id", "The same.", "launcher")
SLURM_HET = Variable("SLURM_HET_SIZE", str, "", "a number", "Set: the job's parts have ids of their own.", "launcher")
TEST = Variable(
    "PYTEST_CURRENT_TEST", str, "", "a test's name", "Names the test that ends a job of the kit.", "launcher"
)

# -- what tpcore sets for the processes that it starts ------------------------------------------------------
STORE = Variable(
    "TPCORE_STORE",
    str,
    "",
    "a path",
    "The file by which the processes of a traced model find each other, instead of a port.",
    "tpcore",
)

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
