"""The environment variable of gloo that the backend sets."""

from __future__ import annotations

from tpcore.settings import Variable

INTERFACE = Variable(
    "GLOO_SOCKET_IFNAME",
    str,
    "",
    "a network interface",
    "Where gloo listens. Unset, a group of one process listens on the loopback interface only.",
)
