"""Two emulated hosts on one machine, joined by a slow link.

Two network namespaces, each held by an idle process, are joined by a veth pair whose ends have a token bucket
filter (``tc``). A process in a namespace sees only the link.

Invariant: nothing needs to be cleaned up. The namespaces have no names, so two runs do not clash, and the
kernel drops them with the processes inside. The holders end as soon as this process is gone, for any reason.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

DEVICES = ("ddp0", "ddp1")
TOOLS = ("ip", "tc", "unshare", "nsenter")
BUCKET = ("burst", "256kb", "latency", "100ms")
LIMIT_S = 30.0


@dataclass(frozen=True)
class Network:
    """How to start each rank's process so that it sees the link.

    Attributes:
        description: the connection between the ranks, for people.
        interfaces: the network interface of each rank.
        prefixes: for each rank, the words before its command.
        emulated: whether there is a slow link; if not, the ranks share this machine's loopback.
    """

    description: str
    interfaces: tuple[str, str]
    prefixes: tuple[tuple[str, ...], tuple[str, ...]]
    emulated: bool


def loopback(reason: str) -> Network:
    """The network to use if no link can be emulated, for the given reason."""
    return Network(f"loopback, no emulated link: {reason}", ("lo", "lo"), ((), ()), emulated=False)


def enter(pid: int) -> tuple[str, ...]:
    """The words before a command that make it run in the network namespace of a process.

    >>> enter(7)
    ('nsenter', '--target', '7', '--net')
    """
    return "nsenter", "--target", str(pid), "--net"


def link_commands(holders: tuple[int, int], rate: str) -> list[tuple[str, ...]]:
    """The commands that join two network namespaces.

    Args:
        holders: a process in each of them.
        rate: the rate limit of each end, in ``tc``'s notation.

    Returns:
        Commands, in order. The first makes both devices inside the namespaces; this machine's own network
        never sees them.
    """
    ends = [("name", device, "netns", str(pid)) for device, pid in zip(DEVICES, holders, strict=True)]
    commands: list[tuple[str, ...]] = [("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])]
    for number, (device, pid) in enumerate(zip(DEVICES, holders, strict=True), start=1):
        inside = (
            ("ip", "address", "add", f"192.0.2.{number}/30", "dev", device),
            ("ip", "link", "set", "lo", "up"),
            ("ip", "link", "set", device, "up"),
            ("tc", "qdisc", "add", "dev", device, "root", "tbf", *BUCKET, "rate", rate),
        )
        commands += [(*enter(pid), *command) for command in inside]
    return commands


@contextmanager
def two_hosts(rate: str) -> Iterator[Network]:
    """Emulate two hosts, or fall back to loopback with the reason.

    Args:
        rate: the rate limit of each host, in ``tc``'s notation, for instance ``"1gbit"``.

    Yields:
        The network: the emulated link, or loopback.
    """
    with ExitStack() as opened:
        reason = _missing()
        if reason is None:
            try:
                pids = opened.enter_context(_holder()), opened.enter_context(_holder())
                for command in link_commands(pids, rate):
                    _run(command)
            except (OSError, subprocess.SubprocessError) as error:
                reason = _words(error)
            else:
                description = f"2 network namespaces, veth, tbf {rate} each way"
                yield Network(description, DEVICES, (enter(pids[0]), enter(pids[1])), emulated=True)
                return
        yield loopback(reason)


def _missing() -> str | None:
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found"
    return "it requires root" if os.geteuid() != 0 else None


@contextmanager
def _holder() -> Iterator[int]:
    """Start a process that holds a new network namespace; yields its process id."""
    # cat ends with its input: when this block is left, or when this process is gone
    process = subprocess.Popen(
        ["unshare", "--net", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    try:
        assert process.stdin is not None  # a pipe
        assert process.stdout is not None  # the same
        process.stdin.write(b"?")
        if process.stdout.read(1) != b"?" or _network(process.pid) == _network(os.getpid()):
            raise OSError("unshare --net made no network namespace")
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _network(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)


def _words(error: Exception) -> str:
    """An error in one line."""
    said = getattr(error, "stderr", None) or str(error)
    return " ".join(str(said).split())
