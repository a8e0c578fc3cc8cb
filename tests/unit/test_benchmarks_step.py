"""Tests of the pure parts of `benchmarks.step`: limit, table, arguments, network, picture."""

import io
import json
import subprocess
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmarks import network
from benchmarks.network import enter, link_commands, loopback, two_hosts
from benchmarks.step import (
    fastest_parts,
    figures_of,
    limit,
    main,
    parts_line,
    problems,
    rank_environment,
    rows,
    table,
)
from benchmarks.step_rank import MODES, STEPS_A_TURN, WORKLOADS, Figures
from benchmarks.timeline import Trace, draw, tracks

PARTS = {
    "forward": 2.0,
    "backward": 4.0,
    "update": 1.0,
    "first_bucket": 0.25,
    "comm": 9.0,
    "last_bucket": 1.5,
}
SVG = "{http://www.w3.org/2000/svg}"


def figures(**steps_s: list[float]) -> Figures:
    samples = len(next(iter(steps_s.values())))
    parts = {name: [value] * samples for name, value in PARTS.items()}
    return Figures("linears", [4 * 2**20] * 8, dict.fromkeys(steps_s, 3.0), steps_s, parts, {})


def trace(end: float = 10.0) -> Trace:
    return Trace((0.0, 2.0), (2.0, end - 1), (end - 1, end), (3.0, 5.0), ((3.5, 6.0), (5.5, end - 1)))


def test_a_slow_network_starts_with_the_first_bucket_and_never_rests() -> None:
    assert limit(PARTS) == 2 + 0.25 * 4 + 9 + 1


def test_a_fast_network_has_only_the_last_bucket_left_when_the_backward_is_over() -> None:
    assert limit({**PARTS, "comm": 4.0}) == 2 + 4 + 1.5 + 1


def test_the_fastest_of_each_part_makes_the_limit_with_the_usual_share() -> None:
    found = figures(eager=[14.0] * 3 * STEPS_A_TURN)
    found.parts["comm"][1] = 12.0
    found.parts["backward"][0] = 40.0
    found.parts["first_bucket"][2] = 0.01
    assert fastest_parts(found) == PARTS


def test_ratios_are_of_the_fastest_steps() -> None:
    eager, torchs, inline = rows(
        figures(eager=[40.0, 20.0], torch=[30.0, 90.0], inline=[15.0, 100.0]),
    )
    assert (eager.to_eager, torchs.to_eager, inline.to_eager) == (1.0, 1.5, 0.75)
    assert (eager.to_torch, inline.to_torch) == (20 / 30, 0.5)
    assert inline.to_limit == 15 / 13


def test_the_spread_is_over_all_steps() -> None:
    (row,) = rows(figures(whole=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    assert (row.fastest_s, row.step_s, row.spread_s) == (1.0, 3.5, (2.25, 4.75))


def test_without_eager_and_torch_there_is_no_ratio_to_them() -> None:
    (row,) = rows(figures(inline=[13.0, 13.0]))
    assert (row.to_eager, row.to_torch, row.to_limit) == (None, None, 1.0)


def test_only_inline_is_asked_to_be_near_the_limit() -> None:
    steps = {mode: [14.0, 14.0] for mode in MODES}
    assert problems("gpt", rows(figures(**steps))) == [
        "gpt: inline takes 1.077 times the physical limit, asked 1.05"
    ]
    assert problems("gpt", rows(figures(**{**steps, "inline": [13.6, 13.6]}))) == []


def test_the_table_shows_what_is_asked_and_what_is_not_known() -> None:
    found = figures(torch=[0.34, 0.35], inline=[13.0, 13.0])
    console = Console(width=140, file=io.StringIO())
    with console.capture() as captured:
        console.print(table(found, rows(found)))
    shown = captured.get()
    torch_line, inline_line = (line for line in shown.splitlines() if line.startswith("│"))
    assert [cell.strip() for cell in torch_line.strip("│").split("│")] == [
        "torch",
        "340",
        "345 (342 – 348)",
        "–",
        "1.000",
        "0.026",
        "3.0",
    ]
    assert "1.000 (asked 1.05)" in inline_line
    assert WORKLOADS["linears"].about in shown


def test_the_parts_of_the_limit_are_told() -> None:
    assert parts_line(figures(inline=[0.3, 0.3])) == (
        "physical limit 13000 ms: forward 2000, backward 4000, first bucket after 25 % of it, "
        "all-reduce of 32.0 MiB in 8 buckets 9000, of the last one 1500, update 1000"
    )


def test_figures_survive_json() -> None:
    found = replace(figures(inline=[1.0, 2.0]), traces={"inline": trace()})
    assert figures_of(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "linears,bert"], "expected some of linears, gpt, got 'bert'"),
        (["--modes", "eager,fast"], "expected some of eager, whole, torch, split, inline, got 'fast'"),
        (["--backend", "inducktor"], "got 'inducktor'"),
        (["--rate", "fast"], "expected a rate such as 1gbit or 500mbit, got 'fast'"),
        (["--rate", "0gbit"], "got '0gbit'"),
        (["--rate", "1.2.3gbit"], "got '1.2.3gbit'"),
        (["--rounds", "0"], "invalid choice: 0"),
    ],
)
def test_an_argument_that_cannot_be_is_a_usage_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_ranks_have_one_thread_and_no_cache() -> None:
    environment = rank_environment("/somewhere")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["TORCHINDUCTOR_FX_GRAPH_CACHE"] == environment["TORCHINDUCTOR_AUTOGRAD_CACHE"] == "0"
    assert environment["TMPDIR"] == "/somewhere"


def test_the_link_is_made_inside_the_namespaces_and_limited_at_both_ends() -> None:
    make, *inside = (" ".join(command) for command in link_commands((11, 22), "500mbit"))
    assert make == "ip link add name ddp0 netns 11 type veth peer name ddp1 netns 22"
    assert inside[:4] == [
        "nsenter --target 11 --net ip address add 192.0.2.1/30 dev ddp0",
        "nsenter --target 11 --net ip link set lo up",
        "nsenter --target 11 --net ip link set ddp0 up",
        "nsenter --target 11 --net tc qdisc add dev ddp0 root tbf burst 256kb latency 100ms rate 500mbit",
    ]
    swapped = [
        line.replace("11", "22").replace("ddp0", "ddp1").replace("2.1/", "2.2/") for line in inside[:4]
    ]
    assert inside[4:] == swapped


def test_nothing_names_a_namespace_so_that_runs_do_not_clash() -> None:
    words = [word for command in link_commands((11, 22), "1gbit") for word in command]
    assert "-n" not in words
    assert words.count("netns") == 2  # each with the number of a process


def test_without_root_the_ranks_share_loopback_and_the_result_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: tool)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with two_hosts("1gbit") as found:
        assert found == loopback("it takes root")
    assert found.description == "loopback, no emulated link: it takes root"


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None if tool in ("tc", "nsenter") else tool)
    with two_hosts("1gbit") as found:
        assert found == loopback("tc, nsenter not found")


def test_a_network_that_refuses_a_command_leads_to_loopback_and_leaves_no_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[Any]] = []

    class Holder(subprocess.Popen[Any]):
        def __init__(self, *_: object, **options: Any) -> None:
            super().__init__(["cat"], **options)
            started.append(self)

    def refuse(command: tuple[str, ...]) -> None:
        raise subprocess.CalledProcessError(2, command, stderr="Error: Specified qdisc kind is unknown.\n")

    monkeypatch.setattr(network, "_missing", lambda: None)
    monkeypatch.setattr(network, "_network", str)
    monkeypatch.setattr(network, "_run", refuse)
    monkeypatch.setattr("subprocess.Popen", Holder)
    with two_hosts("1gbit") as found:
        assert found == loopback("Error: Specified qdisc kind is unknown.")
    assert len(started) == 2
    assert all(holder.returncode is not None for holder in started)


def test_entering_a_namespace_is_a_prefix() -> None:
    assert " ".join((*enter(7), "tc")) == "nsenter --target 7 --net tc"


def test_transfers_at_one_time_stand_on_tracks_of_their_own() -> None:
    assert tracks([(0, 5), (1, 9), (5, 7), (9, 10)]) == [0, 1, 0, 0]


def test_the_picture_has_a_bar_for_each_transfer_and_waiting_begins_with_the_last_launch() -> None:
    picture = ElementTree.fromstring(draw("a step", {"eager": trace(), "inline": trace(20)}, limit_ms=9.0))
    kinds = [element.get("class") for element in picture.iter(f"{SVG}rect")]
    assert kinds.count("transfer") == 1 + 4  # the legend's, and two for each mode
    backward, waiting = (
        [element for element in picture.iter(f"{SVG}rect") if element.get("class") == kind][-1]
        for kind in ("backward", "waiting")
    )
    ends = float(backward.get("x", 0)) + float(backward.get("width", 0))
    assert ends == pytest.approx(float(waiting.get("x", 0)), abs=0.2)
    words = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"eager", "inline", "10 ms", "20 ms", "physical limit"} <= {*words}


def test_without_a_limit_no_line_is_drawn() -> None:
    picture = ElementTree.fromstring(draw("a step", {"eager": trace()}, limit_ms=None))
    assert "limit" not in [element.get("class") for element in picture.iter(f"{SVG}line")]


def test_a_mode_that_sends_nothing_can_be_drawn() -> None:
    silent = Trace((0, 1), (1, 3), (3, 4), (), ())
    assert "4 ms" in draw("a step", {"eager": silent}, None)
