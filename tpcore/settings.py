"""The environment variables that tpcore reads. No other module touches the environment.

A backend declares its own variables with ``Variable`` too. ``docs/environment.md`` lists every one of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. An empty value counts as unset."""

    name: str
    parse: Callable[[str], T]
    """Raises ValueError with what the value must be: "a whole number"."""
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
    "The backend for `init(backend=None)`. Default: `neuron` where it can run, else `cpu_gloo`.",
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
    "How much of the program is checked while it runs. Over torch.distributed: collectives are compared "
    "between the ranks, and waited for before they run: the first 512 of each group, all, or no comparison. "
    "`always` also finds parts that are taken for wholes and tp ranks that have other data. Over torch_xla "
    "it names each line that reads a value inside a step. See "
    "[When something goes wrong](debugging.md#checked-collectives).",
)
THREADS = Variable(
    "OMP_NUM_THREADS",
    whole,
    1,
    "a number, default `1` in processes that `tpcore.launch` starts",
    "Threads that torch computes with in each process.",
)

# -- what a launcher sets -----------------------------------------------------------------------------------
RANK = Variable("RANK", whole, 0, "0 to `WORLD_SIZE` - 1", "This process among all of the job.", "launcher")
WORLD_SIZE = Variable(
    "WORLD_SIZE", whole, 1, "a number", "Processes of the job. Unset: a process alone.", "launcher"
)
LOCAL_RANK = Variable(
    "LOCAL_RANK", whole, 0, "a number", "This process among those of its host: picks its device.", "launcher"
)
LOCAL_WORLD_SIZE = Variable(
    "LOCAL_WORLD_SIZE", whole, 1, "a number", "Processes of the job on this host.", "launcher"
)
MASTER_ADDR = Variable("MASTER_ADDR", str, "", "a host", "Where the job's store listens.", "launcher")
MASTER_PORT = Variable("MASTER_PORT", whole, 0, "a port", "Where the job's store listens.", "launcher")
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
TEST = Variable(
    "PYTEST_CURRENT_TEST", str, "", "a test's name", "Names the test that ends a job of the kit.", "launcher"
)

# -- what tpcore sets for the processes that it starts ------------------------------------------------------
STORE = Variable(
    "TPCORE_STORE",
    str,
    "",
    "a path",
    "The file at which the processes of a traced model meet, instead of a port.",
    "tpcore",
)

LAUNCHER = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
"""How names begin that a launcher of this process may have set and that are not meant for its children."""


# -- environments of processes ------------------------------------------------------------------------------
def environment() -> dict[str, str]:
    """A copy of this process's."""
    return dict(os.environ)


def inherited() -> dict[str, str]:
    """What a child process gets of this process's environment: not which rank of which job this one is."""
    own = {v.name for v in (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, STORE)}
    return {k: v for k, v in os.environ.items() if k not in own and not k.startswith(LAUNCHER)}


def of_rank(rank: int, size: int) -> dict[str, str]:
    """As a launcher tells one of ``size`` ranks, all of this host, which it is."""
    values = ((RANK, rank), (WORLD_SIZE, size), (LOCAL_RANK, rank), (LOCAL_WORLD_SIZE, size))
    return {variable.name: str(value) for variable, value in values}


def update(variables: Mapping[str, str]) -> None:
    """For libraries that read the environment themselves, before they do."""
    os.environ.update(variables)


def restore(before: Mapping[str, str]) -> None:
    """Make the environment what ``environment()`` gave."""
    for name in [k for k in os.environ if k not in before]:
        del os.environ[name]
    os.environ.update(before)


@contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """``variables`` are set inside the block, and as before after it."""
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
