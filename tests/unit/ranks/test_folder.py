"""What ranks and their launcher read of each other, also of a rank that was killed while it wrote."""

import os
from pathlib import Path

from ddpopt.ranks.folder import EventReader, EventWriter, RankFiles


def test_events_arrive_once_and_in_order(tmp_path: Path) -> None:
    reader, writer = EventReader(tmp_path), EventWriter(tmp_path)
    assert list(reader.receive()) == []
    writer.send("a")
    writer.send({"b": 1})
    assert list(reader.receive()) == ["a", {"b": 1}]
    writer.send(None)
    assert list(reader.receive()) == [None]
    assert list(reader.receive()) == []


def test_an_event_that_is_still_being_written_waits_for_the_rest_of_it(tmp_path: Path) -> None:
    reader, writer = EventReader(tmp_path), EventWriter(tmp_path)
    writer.send("whole")
    writer.send("cut")
    path = tmp_path / "events"
    data = path.read_bytes()
    for missing in (1, len("cut") + 1):
        path.write_bytes(data[:-missing])
        assert list(EventReader(tmp_path).receive()) == ["whole"]
    assert list(reader.receive()) == ["whole"]
    path.write_bytes(data)
    assert list(reader.receive()) == ["cut"]


def test_the_last_whole_note_is_what_a_rank_did_last(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 1)
    assert files.last_note() == ""
    files.note("one\nline")
    assert files.last_note() == "one\nline"
    with (tmp_path / "rank-1.notes").open("a") as file:
        file.write('"tw')
    assert files.last_note() == "one\nline"


def test_a_process_is_gone_when_it_is_a_zombie_and_when_it_is_no_more(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 0)
    assert not files.is_gone()  # it has not said that it started
    reading, writing = os.pipe()
    child = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)])
    files.pid.write_text(str(child))
    os.close(reading)
    assert not files.is_gone()
    os.kill(child, 9)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert files.is_gone()
    os.waitpid(child, 0)
    assert files.is_gone()
    os.close(writing)


def test_of_a_long_output_the_end_is_kept(tmp_path: Path) -> None:
    files = RankFiles(tmp_path, 0)
    assert files.output() == ""
    (tmp_path / "rank-0.output").write_text("a" * 2**17 + "the end")
    assert files.output().endswith("athe end")
    assert len(files.output()) == 2**16
