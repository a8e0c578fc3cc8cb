"""What the environment says about ranks: whether a launcher started this process as one, and which.

Without torch: every pytest run of an environment asks this. Invariant: a process is a launched rank exactly
if the variables are set that torchrun sets, and that ``torch.distributed`` itself reads.
"""

import os

__all__ = ["environment_of_no_rank", "launched_ranks", "own_rank", "own_size"]

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
RENDEZVOUS_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREIGN_PREFIXES = ("TORCHELASTIC_", "PYTEST_XDIST_")
# What pytest has read already, and what it says of the test that runs.
FOREIGN_NAMES = (*RANK_VARIABLES, "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST")


def launched_ranks() -> int | None:
    """Count the ranks that torchrun, or another launcher that speaks its language, started.

    Returns:
        The world size; None if no launcher started this process.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or all(name in os.environ for name in RENDEZVOUS_VARIABLES):
        return own_size()
    return None


def own_rank() -> int:
    """Give this process's number, in a rank."""
    return int(os.environ["RANK"])


def own_size() -> int:
    """Give the number of ranks, in a rank."""
    return int(os.environ["WORLD_SIZE"])


def environment_of_no_rank() -> dict[str, str]:
    """Copy the environment without anything that makes a process a rank, or a worker of this pytest run.

    Returns:
        An environment for a process that is to start its own run.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
    }
