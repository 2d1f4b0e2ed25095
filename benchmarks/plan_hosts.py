"""The link between two hosts, measured by calibration's all-reduces: network namespaces with a wire that delays.

Needs root, iproute2 and /dev/net/tun. ``--machine FILE`` adds the link to a machine's file that
``python -m benchmarks.calibrate`` wrote.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import tpcore
from tpcore_plan.machine import Machine

from .harness import conditions, say
from .links import AllReduce, between_hosts, fit

HOSTS, LIMIT = 2, 600.0  # seconds, against hangs alone


def rank(home: str, per_host: int, seconds: float) -> None:
    ctx = tpcore.init("cpu_gloo", tp=per_host)
    calls = between_hosts(ctx, per_host, seconds)
    if ctx.rank == 0:
        Path(home, "calls").write_text(json.dumps([dataclasses.asdict(call) for call in calls]))
    tpcore.shutdown()


def on_hosts(program: str, args: tuple[Any, ...], *, per_host: int, delay: float, rate: float) -> None:
    """Run ``program``, ``package.module:function``, as each rank of a job over ``HOSTS`` hosts, on a wire with
    ``delay`` seconds and ``rate`` bits a second each way. Raises RuntimeError with what the ranks printed if one
    fails."""
    tests = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "hosts")]  # its hosts are what the drills run on
    machines, network = (import_module(name) for name in ("machines", "network"))
    environment = machines.environment(HOSTS * per_host, os.environ.get("TPCORE_CHECK", "warmup"))
    with tempfile.TemporaryDirectory() as home, _wired(network, delay, rate) as wired:
        hosts: list[Any] = [machines.Machine(wired, i, Path(home), i * per_host, per_host) for i in range(HOSTS)]
        for host in hosts:
            host.start(_called, (program, *args), environment)
        for host in hosts:
            host.join(LIMIT)
        failed = [host.printed(r) for host in hosts for r in host.ranks if host.ended(r)[0]]
        if failed:
            raise RuntimeError("\n".join(failed))


def _called(program: str, *args: Any) -> None:
    module, _, function = program.partition(":")
    getattr(import_module(module), function)(*args)


def measured(delay: float, rate: float, per_host: int, seconds: float) -> list[AllReduce]:
    """All-reduces between the hosts."""
    with tempfile.TemporaryDirectory() as home:
        on_hosts("benchmarks.plan_hosts:rank", (home, per_host, seconds), per_host=per_host, delay=delay, rate=rate)
        return [AllReduce(**call) for call in json.loads(Path(home, "calls").read_text())]


@contextmanager
def _wired(network: ModuleType, delay: float, rate: float) -> Iterator[Any]:
    """The hosts of the drills, with a wire of ``benchmarks.wire`` in place of their switch."""
    with network.Network(HOSTS) as hosts:
        names = [hosts._of(name) for name in hosts.names]
        for name in names:
            _ip("-n", name, "link", "del", "eth0")
        command = [sys.executable, "-m", "benchmarks.wire", *names, str(delay), str(rate)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as wire:
            try:
                if wire.stdout is None or wire.stdout.readline() != "ready\n":
                    raise OSError(f"{' '.join(command)} made no wire")
                for i, name in enumerate(names):
                    _ip("-n", name, "addr", "add", f"{network.address(i)}/24", "dev", "eth0")
                    _ip("-n", name, "link", "set", "eth0", "mtu", "9000", "up")  # as between hosts of a cluster
                yield hosts
            finally:
                wire.kill()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay", type=float, default=0.5, help="milliseconds one way")
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit that a host sends in a second")
    parser.add_argument("--per-host", type=int, default=1, help="ranks of a host")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each size")
    parser.add_argument("--machine", type=Path, help="a machine's file, to write the link into")
    options = parser.parse_args()
    os.environ.setdefault("TPCORE_CHECK", "warmup")
    calls = measured(options.delay / 1e3, options.rate * 1e6, options.per_host, options.seconds)
    link, error = fit(calls)
    wire = f"{options.rate:g} Mbit/s and {options.delay:g} ms each way"
    say(f"{conditions(HOSTS * options.per_host)}\n\n{HOSTS} hosts of {options.per_host} ranks, {wire}\n")
    say("| bytes | milliseconds | fitted |\n|---:|---:|---:|")
    for call in calls:
        fitted = call.steps * link.latency + call.sent / link.bandwidth
        say(f"| {call.nbytes:,} | {call.seconds * 1e3:.3g} | {fitted * 1e3:.3g} |")
    step = f"{link.latency * 1e6:.3g} microseconds a step"
    text = f"{step}, {link.bandwidth / 1e6:.3g} MB/s a rank, median error {error:.0%}"
    say(f"\n{text}")
    if options.machine is not None:
        machine = Machine.read(options.machine)
        source = {**machine.source, "between": f"measured over {HOSTS} hosts with {wire}: {text}"}
        dataclasses.replace(machine, hosts=HOSTS, between=link, source=source).write(options.machine)


if __name__ == "__main__":
    main()
