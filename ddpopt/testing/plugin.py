"""pytest plugin: ``@pytest.mark.world_size(n)`` says how many ranks a test needs.

Under torchrun the number of ranks is given from outside, so a test may find fewer than it needs. Such a test
says so and is skipped, or fails where ``--too-few-ranks=fail`` was given (for runs that must not lose a
test). Outside torchrun nothing happens here: tests that need ranks start their own.

Invariant: the decision depends on the environment alone, so every rank of a run skips the same tests. One
rank that ran a test which its peers skip would wait in its first collective for good.

pytest loads this in every run of an environment where ddpopt is installed, also in those that have nothing to
do with it; so it does nothing until a test is marked.
"""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--too-few-ranks``.

    Args:
        parser: pytest's own.
    """
    parser.getgroup("ddpopt").addoption(
        "--too-few-ranks",
        choices=("skip", "fail"),
        default="skip",
        help="what a test marked world_size(n) does under torchrun with fewer than n ranks (default: skip)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker.

    Args:
        config: pytest's own.
    """
    config.addinivalue_line("markers", "world_size(n): the test needs n ranks (ddpopt)")


def ranks_under_torchrun() -> int | None:
    """Count the ranks that torchrun started.

    Returns:
        The world size, or None outside torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["WORLD_SIZE"])


def needed_ranks(item: pytest.Item) -> int:
    """Read how many ranks a test needs.

    Args:
        item: a collected test.

    Returns:
        The argument of its nearest ``world_size`` marker, or 1 without one.

    Raises:
        pytest.UsageError: the marker does not hold one positive int.
    """
    marker = item.get_closest_marker("world_size")
    if marker is None:
        return 1
    match marker.args:
        case (int(count),) if count > 0 and not marker.kwargs:
            return count
    raise pytest.UsageError(
        f"{item.nodeid}: expected world_size(n) with one positive int, got args {marker.args!r}, "
        f"kwargs {marker.kwargs!r}. Write @pytest.mark.world_size(2)."
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test that needs more ranks than torchrun started.

    Args:
        item: the test about to run.
    """
    needed, present = needed_ranks(item), ranks_under_torchrun()
    if present is None or present >= needed:
        return
    reason = f"needs {needed} ranks, this run has {present}: torchrun --nproc-per-node {needed} -m pytest …"
    if item.config.getoption("--too-few-ranks") == "fail":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
