"""Run an example as ``__main__`` on this rank, and print what each of its DDP modules really did.

``EAGER`` or ``FOLLOWED`` for each module, in the order in which they were made: a module is followed only if
graphs were compiled, its reducer's buckets are those of ddpopt's plan, and each backward sent exactly these.
"""

import runpy
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import DistributedDataParallel

import ddpopt
from ddpopt.ddp.impose import imposed_plan
from ddpopt.observation.observe import Observation

seen: list[tuple[DistributedDataParallel, Observation]] = []
stack = ExitStack()


def watched(self: Any, *args: Any, **kwargs: Any) -> None:
    made(self, *args, **kwargs)
    stack.close()  # the modules train one after the other
    seen.append((self, stack.enter_context(ddpopt.observe(self))))


def what(ddp: DistributedDataParallel, observation: Observation) -> str:
    plan, iterations = imposed_plan(ddp), observation.iterations
    if not iterations or any(iteration.unmatched for iteration in iterations):
        return f"NOT REDUCED {iterations}"
    if plan is None and not observation.graphs:
        return "EAGER"
    planned = None if plan is None else [bucket.params for bucket in plan.buckets]
    follows = all([bucket.params for bucket in iteration.buckets] == planned for iteration in iterations)
    enough = planned is not None and len(planned) > 1 and bool(observation.graphs)
    return "FOLLOWED" if follows and enough else f"ASTRAY {planned} {observation.buckets}"


if __name__ == "__main__":
    made = DistributedDataParallel.__init__
    code: object = None
    sys.argv[:] = sys.argv[1:]
    with stack, patch.object(DistributedDataParallel, "__init__", watched):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    print(f"modules: {', '.join(what(*module) for module in seen)}\n", end="")
    sys.exit(code)  # type: ignore[arg-type]  # as the example gave it
