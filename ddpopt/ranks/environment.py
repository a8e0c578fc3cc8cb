"""Read from the environment whether a launcher started this process as a rank, and as which one.

Does not import torch, because every pytest run calls it. Invariant: a process is a launched rank exactly if
the variables are set that torchrun sets and ``torch.distributed`` itself reads.
"""

import os

__all__ = ["environment_of_no_rank", "has_launched_peers", "launched_ranks", "own_rank", "own_size"]

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RENDEZVOUS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIXES = ("TORCHELASTIC_", "PYTEST_XDIST_")
# The launcher's variables, options that pytest has already read, and the name of the running test.
FOREIGN_NAMES = (*RANK_VARIABLES, "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")


def launched_ranks() -> int | None:
    """Count the ranks started by torchrun, or by another launcher that sets the same variables.

    Returns:
        The world size; None if no launcher started this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or all(name in os.environ for name in RENDEZVOUS_VARIABLES):
        return own_size()
    return None


def has_launched_peers() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and own_size() > 1


def own_rank() -> int:
    """Return this rank's number."""
    return int(os.environ["RANK"])


def own_size() -> int:
    """Return the number of ranks that were launched."""
    return int(os.environ["WORLD_SIZE"])


def environment_of_no_rank() -> dict[str, str]:
    """Copy the environment without anything that makes a process a rank, or a worker of this pytest run.

    Returns:
        An environment for a process that will start its own run.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }
