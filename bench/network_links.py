"""Hosts of their own on one machine: network namespaces behind a switch, with links of a set rate.

Each host is a network namespace with a veth pair to a bridge in a further namespace; what a host sends leaves
through a token bucket (``tc tbf``), which keeps the link's time without costing the cores any. Its processes
run in a UTS namespace with the host's own name, since gloo looks its own name up to find the address that the
others are to call, and /etc/netns/NAME/hosts answers with the address on that link.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

TOOLS: Final = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "hostname": "hostname",
    "taskset": "util-linux",
}
"""The programs that are run, and the Debian packages that have them."""

SUBNET: Final = "10.77.0"
PREFIX: Final = "ocn"
"""What the names of all namespaces begin with; the process id of their run follows."""

HOSTS_FILES: Final = Path("/etc/netns")

LEAST_BURST_BYTES: Final = 70_000
"""One segment of the largest size: a smaller bucket would never let it through whole."""

BURST_S: Final = 5e-4
"""How long a link may have been idle and still send at once what it could have sent in that time."""

QUEUE_S: Final = 0.4
"""How much may wait for a link: so much that nothing is dropped."""

_NAME: Final = re.compile(rf"{PREFIX}(\d+)(?:s|h\d+)")


class LinksError(RuntimeError):
    """The links cannot be made on this machine; the message says what is missing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
      name: of its namespace, and its host name.
      address: its IPv4 address on the link.
      core: the CPU core its processes are pinned to.
    """

    name: str
    address: str
    core: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` on this host."""
        inside = 'hostname "$1"; core="$2"; shift 2; exec taskset --cpu-list "$core" "$@"'
        return [
            *("ip", "netns", "exec", self.name, "unshare", "--uts"),
            *("sh", "-c", inside, "sh", self.name, str(self.core), *argv),
        ]


def missing() -> str:
    """What this machine lacks to make links, and what to do; empty if nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root: run as root (sudo), or use --loopback"
    packages = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if packages:
        names = " ".join(sorted(packages))
        return f"programs are missing: apt-get install -y {names} (or use --loopback)"
    return ""


def hosts(count: int, cores: Sequence[int], run: int) -> tuple[Host, ...]:
    """The hosts of a run; they share the cores evenly if there are more of them."""
    return tuple(Host(f"{PREFIX}{run}h{i}", f"{SUBNET}.{i + 1}", cores[i % len(cores)]) for i in range(count))


def setup_commands(host: Host, number: int, switch: str) -> list[list[str]]:
    """What joins a host to the switch."""
    add = ["ip", "-n", switch, "link", "add"]
    return [
        ["ip", "netns", "add", host.name],
        [*add, f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", host.name],
        ["ip", "-n", switch, "link", "set", f"p{number}", "master", "br0", "up"],
        ["ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0"],
        ["ip", "-n", host.name, "link", "set", "eth0", "up"],
        ["ip", "-n", host.name, "link", "set", "lo", "up"],
    ]


def rate_command(host: Host, bytes_per_s: float) -> list[str]:
    """What limits what a host sends."""
    burst = max(LEAST_BURST_BYTES, round(bytes_per_s * BURST_S))
    return [
        *("tc", "-n", host.name, "qdisc", "replace", "dev", "eth0", "root", "tbf"),
        *(
            "rate",
            f"{round(bytes_per_s * 8)}bit",
            "burst",
            f"{burst}b",
            "latency",
            f"{round(QUEUE_S * 1e3)}ms",
        ),
    ]


def hosts_file(all_hosts: Sequence[Host]) -> str:
    """/etc/hosts as every host sees it."""
    return "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in all_hosts)


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """The hosts of a run, joined."""

    hosts: tuple[Host, ...]

    def set_rate(self, bytes_per_s: float) -> None:
        """Limits what every host sends, from now on."""
        for host in self.hosts:
            _run(rate_command(host, bytes_per_s))


@contextlib.contextmanager
def links(count: int, cores: Sequence[int]) -> Iterator[Links]:
    """Makes hosts and joins them; removes everything again, whatever happens.

    Namespaces that a killed run left behind are removed first.

    Raises:
      LinksError: this machine lacks something; or the kernel refuses.
    """
    lacking = missing()
    if lacking:
        raise LinksError(lacking)
    remove_left_behind()
    run = os.getpid()
    switch, made = f"{PREFIX}{run}s", hosts(count, cores, run)
    names = [switch, *(host.name for host in made)]
    try:
        _run(["ip", "netns", "add", switch])
        _run(["ip", "-n", switch, "link", "add", "br0", "type", "bridge"])
        _run(["ip", "-n", switch, "link", "set", "br0", "up"])
        for number, host in enumerate(made):
            folder = HOSTS_FILES / host.name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(hosts_file(made))
            for command in setup_commands(host, number, switch):
                _run(command)
        yield Links(made)
    finally:
        remove(names)


def remove(names: Sequence[str]) -> None:
    """Removes namespaces, what runs in them, and their files, as far as they exist.

    Links go with their namespaces. Processes outlive a killed run: they wait for each other in a collective.
    """
    there = set(namespaces())
    for name in names:
        if name in there:
            for pid in _run(["ip", "netns", "pids", name]).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _run(["ip", "netns", "delete", name], attempts=5)
        shutil.rmtree(HOSTS_FILES / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        HOSTS_FILES.rmdir()


def remove_left_behind() -> list[str]:
    """Removes what runs whose process is gone have left; returns the names."""
    files = [folder.name for folder in HOSTS_FILES.iterdir()] if HOSTS_FILES.is_dir() else []
    names = sorted({*left_behind(namespaces()), *left_behind(files)})
    remove(names)
    return names


def left_behind(names: Sequence[str]) -> list[str]:
    """Which of the names belong to runs of this benchmark whose process is gone."""
    matches = ((name, _NAME.fullmatch(name)) for name in names)
    return [name for name, match in matches if match and not Path(f"/proc/{match[1]}").exists()]


def namespaces() -> list[str]:
    """The names of all network namespaces."""
    return [line.split()[0] for line in _run(["ip", "netns", "list"]).splitlines() if line.strip()]


def _run(command: Sequence[str], attempts: int = 1) -> str:
    for attempt in range(attempts):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        if attempt + 1 < attempts:
            time.sleep(0.2)
    said = " ".join((done.stderr or done.stdout).split())
    raise LinksError(f"{' '.join(command)}: {said or f'exit status {done.returncode}'}")
