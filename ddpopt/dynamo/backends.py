"""Resolve backends as the command line names them: by Dynamo's name, or as ``package.module:function``.

Invariant: a name without a colon stays a name, so reports and scripts show what the user gave.
"""

import pkgutil
from typing import Any

from ddpopt.dynamo.backend import find_compiler
from ddpopt.errors import UsageError

HELP = "give 'package.module:function', or the name of a backend that is registered"


def backend_of(name: str) -> Any:
    """Find the backend that ``--backend`` names.

    Args:
        name: a name that Dynamo knows, or ``package.module:function`` of a callable
            ``(gm, example_inputs)``.

    Returns:
        The callable; Dynamo's names are returned unchanged.

    Raises:
        UsageError: it cannot be found, is not callable, or is ddpopt, which is a mode.
    """
    if name.partition("-")[0] == "ddpopt":
        raise UsageError(
            f"--backend: expected the backend under a mode, got {name!r}, which is ddpopt: that is a --mode; "
            f"{HELP}"
        )
    if ":" not in name:
        find_compiler(name)
        return name
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:
        raise UsageError(
            f"--backend: expected a Dynamo backend, got {name!r}, which cannot be imported: "
            f"{type(error).__name__}: {error}; {HELP}"
        ) from error
    if not callable(found):
        raise UsageError(
            f"--backend: expected a callable (gm, example_inputs), got {name!r}, which is a "
            f"{type(found).__name__}; {HELP}"
        )
    return found
