"""Why a job is lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ...errors import BackendError, CollectiveTimeoutError, PeerLostError


@dataclass(frozen=True)
class Verdict:
    """The first one posted holds for every rank."""

    kind: str  # "lost" or "timeout"
    text: str

    def error(self, doing: str) -> BackendError:
        cls = CollectiveTimeoutError if self.kind == "timeout" else PeerLostError
        return cls(f"{self.text}\nthis rank's last collective: {doing}")


def connection_broke(error: BaseException) -> bool:
    """Whether a transport failed: by torch's type of error, or by the path of gloo's file in its message."""
    if isinstance(error, BackendError):
        return False
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and "transport/" in str(error)
    )


def cause_of_end(error: BaseException) -> str:
    """How ``error`` ended a rank, as the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return f"raised {type(error).__name__}: {error}"
