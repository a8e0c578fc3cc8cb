"""Each command that starts ranks, on two machines under torchrun: two network namespaces, joined by a link.

What counts is that both machines end, what the first one writes, and that a problem of one ends the other.
Without root the two nodes of torchrun share this machine's own network.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from benchmarks.network import Network, two_hosts
from ddpopt.hang import diagnose, read
from ddpopt.ranks.environment import environment_of_no_rank
from ddpopt.ranks.marked import marked
from ddpopt.tuning.records import Link
from tests.support.commands import TORCHRUN

pytestmark = pytest.mark.timeout(300)

KEY = "DDPOPT_TEST_MACHINES"
RATE = "10gbit"
LIMIT_S = 150.0
SOON_S = 60.0
"""Far below the limits of torch, which waits for minutes."""


@dataclass
class Machines:
    """Two machines, each with a folder of its own.

    Attributes:
        network: the network between them.
        folder: the folder with both folders.
        name: the value of a variable that all processes on them have.
        started: torchrun's processes on both.
    """

    network: Network
    folder: Path
    name: str = field(default_factory=lambda: uuid4().hex)
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    @property
    def folders(self) -> tuple[Path, Path]:
        """The folder of each."""
        return self.folder / "first", self.folder / "second"

    def start(self, *words: str, **variables: str) -> None:
        """Start torchrun on both, with one process each."""
        address = "192.0.2.1" if self.network.emulated else "127.0.0.1"
        meeting = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", address, "--master-port")
        port = free_port()
        for node, (prefix, folder) in enumerate(zip(self.network.prefixes, self.folders, strict=True)):
            folder.mkdir(exist_ok=True)
            of_machine = {KEY: self.name, "GLOO_SOCKET_IFNAME": self.network.interfaces[node]}
            process = subprocess.Popen(
                [*prefix, sys.executable, *TORCHRUN, *meeting, port, "--node-rank", str(node), *words],
                cwd=folder,
                env=environment_of_no_rank() | of_machine | {"OMP_NUM_THREADS": "1"} | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self.started.append(process)

    def run(self, *words: str, **variables: str) -> list[tuple[int, str]]:
        """Run torchrun on both; for each its exit code and what it printed."""
        self.start(*words, **variables)
        said = [node.communicate(timeout=LIMIT_S)[0] for node in self.started]
        return [(node.returncode, text) for node, text in zip(self.started, said, strict=True)]

    def end(self) -> None:
        """End all processes."""
        for process in marked(f"{KEY}={self.name}"):
            os.kill(process, signal.SIGKILL)
        for node in self.started:
            node.communicate()


def free_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with two_hosts(RATE) as network:
        both = Machines(network, tmp_path)
        yield both
        both.end()


@pytest.fixture
def apart(machines: Machines) -> Machines:
    """The machines, if each has a network of its own."""
    if not machines.network.emulated:
        pytest.skip(machines.network.description)
    return machines


# ------------------------------------------------------------------------------------------- what is right


@dataclass(frozen=True)
class Asked:
    """A command for two machines.

    Attributes:
        words: what follows ``ddpopt``.
        shows: whether its JSON shows that both took part.
    """

    words: str
    shows: Callable[[Mapping[str, Any]], bool]


COMMANDS = {
    "verify": Asked(
        "verify sequential --backend eager --trajectory 3",
        lambda found: found["world_size"] == 2 and len(found["trials"]) == 2,
    ),
    "matrix": Asked(
        "matrix --mode ddpopt-split --options default --backend eager",
        lambda found: found["world_size"] == 2 and {one["status"] for one in found["trials"]} == {"ok"},
    ),
    "tune": Asked("tune sequential --backend eager", lambda found: found["link"]["world_size"] == 2),
    "link": Asked("link", lambda found: found["world_size"] == 2),
    "fuzz": Asked(
        "fuzz --nproc 1 --mode ddpopt-inline --backend eager --examples 3", lambda found: found["models"] == 6
    ),
    "gate": Asked(
        "gate sequential --baseline b.json --update --backend eager",
        lambda found: list(found["figures"]) == ["sequential"],
    ),
}
BY_DAY = ("gate",)
"""The others by night."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in COMMANDS]
)
def test_a_command_runs_on_both_and_the_first_writes(name: str, machines: Machines) -> None:
    command = COMMANDS[name]
    ddpopt = str(Path(sys.executable).parent / "ddpopt")
    ended = machines.run("--no-python", "--", ddpopt, *command.words.split(), "--json", "found.json")
    assert [code for code, _ in ended] == [0, 0], ended
    first, second = machines.folders
    assert command.shows(json.loads((first / "found.json").read_text()))
    assert not (second / "found.json").exists()
    if name == "gate":
        assert json.loads((first / "b.json").read_text())["settings"]["nproc"] == 2
        assert [*second.iterdir()] == []


# ------------------------------------------------------------------------------------------- what goes wrong

LINK = Link(1e-4, 1e-9, 0.0, 1.0, 0.05, "gloo", 2, {})
PROBLEMS = {
    "one": ("tune sequential --link link.json", ["rank 1 cannot start: --link", "--link: cannot read"]),
    "all": ("verify sequentia", ["did you mean 'sequential'?"] * 2),
    "first": ("gate --baseline b.json", ["there is no file 'b.json'", "rank 0 cannot start: --baseline"]),
}


@pytest.mark.parametrize("who", [pytest.param(who, marks=pytest.mark.nightly) for who in PROBLEMS])
def test_a_problem_of_one_machine_ends_both_at_once(who: str, machines: Machines) -> None:
    words, expected = PROBLEMS[who]
    machines.folders[0].mkdir()
    (machines.folders[0] / "link.json").write_text(LINK.to_json())
    began_s = time.monotonic()
    ended = machines.run("-m", "ddpopt", *words.split())
    assert time.monotonic() - began_s < SOON_S
    for (code, text), said in zip(ended, expected, strict=True):
        assert code == 1
        assert text.count("ddpopt: error:") == 1
        assert said in text


MARKED = """
import pytest

@pytest.mark.world_size(2)
def test_it(ddp_ranks):
    ddp_ranks.gather(1)
"""
NAMELESS = """
import os
import socket

os.environ.pop("GLOO_SOCKET_IFNAME", None)
socket.gethostname = lambda: "localhost"
"""
"""Makes the host's own name mean "this machine", as it often does, with no interface named."""


@pytest.mark.nightly
@pytest.mark.parametrize("words", ["-m ddpopt link", "-m pytest ../test_it.py"])
def test_an_address_that_other_machines_cannot_reach_is_named(words: str, apart: Machines) -> None:
    (apart.folder / "test_it.py").write_text(MARKED)
    (apart.folder / "sitecustomize.py").write_text(NAMELESS)
    began_s = time.monotonic()
    ended = apart.run(*words.split(), PYTHONPATH=str(apart.folder))
    assert time.monotonic() - began_s < SOON_S
    for code, text in ended:
        assert code == 1
        assert "set GLOO_SOCKET_IFNAME to the network interface that leads to the others" in text


TRAINING = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from ddpopt import hang

dist.init_process_group("gloo", timeout=timedelta(seconds=300))
with hang.recording(sys.argv[1], every_s=0.2):
    for step in range(100_000):
        dist.all_reduce(torch.ones(4))
        if step == 100:
            open(f"{sys.argv[1]}/training", "w").close()
        time.sleep(0.01)
"""


@pytest.mark.nightly
def test_a_network_that_stops_in_both_directions_leaves_dumps_that_say_so(apart: Machines) -> None:
    dumps = apart.folder / "dumps"
    script = apart.folder / "train.py"
    script.write_text(TRAINING)
    apart.start(str(script), str(dumps))
    until(lambda: (dumps / "training").exists())
    cut = [*apart.network.prefixes[0], "ip", "link", "set", apart.network.interfaces[0], "down"]
    subprocess.run(cut, check=True)
    time.sleep(3)  # so that what was sent before is in the dumps
    said = str(diagnose(read([str(file) for file in dumps.glob("rank_*")]), 2))
    assert "all ranks entered all_reduce of Float [4] (train.py:11 in <module>)" in said
    assert "it has not completed on ranks 0, 1; none is missing, so look at the network" in said


def until(sign: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not sign():
        assert time.monotonic() < deadline
        time.sleep(0.1)
