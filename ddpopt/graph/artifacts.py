"""What torch's own tools show of a graph: ``TORCH_LOGS=ddp_graphs``, and ``TORCH_TRACE`` with tlparse.

The reasons for what is done with a graph are also logged.

torch adds the id of the running compilation to each entry of a trace.

Invariant: a text is made only if one of these tools shows it.
"""

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx
from torch._logging import LazyString, getArtifactLogger, trace_structured  # type: ignore[attr-defined]  # re-exports

# the logger of torch's own optimizer: torch adds handlers only to loggers whose names begin with "torch"
_log = getArtifactLogger("torch._dynamo.backends.distributed", "ddp_graphs")


def show(name: str, text: Callable[[], str], encoding: str = "string") -> None:
    """Show a text about the graph that is being compiled.

    Args:
        name: its title in the log, and its name in the trace.
        text: makes it.
        encoding: ``"string"`` or ``"json"``.
    """
    log_text(name, text)
    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=text)


def log_text(name: str, text: Callable[[], str]) -> None:
    """Show a text in the log only, for which torch has an entry of its own in the trace, or ddpopt another.

    Args:
        name: its title.
        text: makes it.
    """
    _log.debug("\n---%s---\n%s", name, LazyString(text))


def code_of(gm: Any) -> Callable[[], str]:
    """Makes the code of a graph and of the graphs inside it, with the shapes of its values."""
    return partial(gm.print_readable, print_output=False)


def show_cut(stitched: fx.GraphModule) -> None:
    """Show a graph that was cut; in the trace, under the names that torch uses for its own cut graphs."""
    log_text("ddpopt_split_graph", code_of(stitched))
    trace_structured("optimize_ddp_split_graph", payload_fn=code_of(stitched))
    for name, segment in stitched.named_children():
        log_text(f"ddpopt_{name}", code_of(segment))
        trace_structured("optimize_ddp_split_child", partial(dict, name=name), payload_fn=code_of(segment))


def say(reason: str, level: int = logging.INFO) -> None:
    """Show a reason in the trace of a graph, and log it the first time it applies."""
    show("ddpopt_reason", reason.__str__)
    say_once(reason, level)


@functools.lru_cache(maxsize=256)
def say_once(reason: str, level: int) -> None:
    """Log a reason, if it has not been logged lately."""
    logging.getLogger("ddpopt").log(level, "ddpopt: %s", reason)
