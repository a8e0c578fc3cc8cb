"""The cases that ship with ddpopt: small models, each for one thing that a DDP optimizer can get wrong.

In: a name. Out: a `Case`. Invariant: every case is deterministic, runs under eager DDP on gloo, and needs no
download.
"""

from importlib import import_module

from ddpopt.cases.case import Case
from ddpopt.errors import UsageError, did_you_mean

__all__ = ["case", "cases"]

FAMILIES = (
    *("decoders", "encoders", "vision", "recurrent", "experts", "sparse", "arguments", "parameters"),
    *("sharing", "control", "dataflow", "scalars", "ddp_rows", "tensor_parallel"),
    *("reports_graphs", "reports_shapes", "reports_wrapping"),
)
"""The modules of this package that have cases, in the order in which these are listed."""


def cases() -> tuple[Case, ...]:
    """Return all cases, family by family.

    Returns:
        The cases, in a fixed order.
    """
    return tuple(case for family in FAMILIES for case in import_module(f"{__name__}.{family}").CASES)


def case(name: str) -> Case:
    """Return one case by its name.

    Args:
        name: the case's name, for example ``"gpt"``.

    Returns:
        The case.

    Raises:
        UsageError: if there is no such case.
    """
    by_name = {candidate.name: candidate for candidate in cases()}
    if name not in by_name:
        raise UsageError(
            f"expected the name of a case in the corpus, got {name!r}; 'ddpopt cases' lists them, and "
            f"a function of your own is package.module:name{did_you_mean(name, by_name)}"
        )
    return by_name[name]
