"""The environment variables of the backend: gloo's network interface, and the use of shared memory."""

from __future__ import annotations

from tpcore.settings import Variable, one_of

INTERFACE = Variable(
    "GLOO_SOCKET_IFNAME",
    str,
    "",
    "a network interface",
    "The interface of gloo's sockets. Unset: a group of one process uses the loopback interface only.",
)
SHM = Variable(
    "TPCORE_SHM",
    one_of({"1": True, "0": False}),
    True,
    "`1` (default), `0`",
    "Whether ranks of one host exchange tensors through shared memory. A group uses gloo if a member sets "
    "`0` or cannot map the other members' memory.",
)
