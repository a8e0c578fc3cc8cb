"""What counts as a change of the process: threads that a step leaves, not those that end meanwhile."""

import _thread
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ddpopt.judge.training.surroundings import THREADS, changed, process_state


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """A thread of the program that runs until the context ends."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: over.wait(), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_thread_that_a_step_leaves_is_a_change_also_next_to_one_of_its_name() -> None:
    with waiting("of the program"):
        before = process_state()
        with waiting("of the program"):
            assert changed(before, process_state()) == [THREADS]


def test_a_thread_that_ends_is_none_but_does_not_hide_one_that_is_new() -> None:
    with waiting("of an earlier trial"):
        before = process_state()
    assert changed(before, process_state()) == []
    with waiting("of the step"):
        assert changed(before, process_state()) == [THREADS]


def test_a_thread_that_python_did_not_start_is_none() -> None:
    """As those of backward and of process groups: a callback on them makes them known to Python."""
    before = process_state()
    known, over = threading.Event(), threading.Event()

    def callback() -> None:
        threading.current_thread()
        known.set()
        over.wait()

    _thread.start_new_thread(callback, ())
    known.wait()
    assert changed(before, process_state()) == []
    over.set()
