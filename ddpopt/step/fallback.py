"""What a step does instead where it cannot be captured: it runs in eager, around ``ddpopt.compile(model)``.

Invariant: the user's function runs as it is written; only calls of a DDP module go to its compiled form.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from ddpopt.dynamo.api import compile as ddpopt_compile
from ddpopt.graph.nodes import CompilerFn
from ddpopt.step.capture import StepCall


class Inline:
    """Runs a step around compiled DDP modules.

    Args:
        backend: the Dynamo backend.
    """

    def __init__(self, backend: str | CompilerFn) -> None:
        self._backend = backend
        self._compiled: dict[int, Any] = {}

    def run(self, call: StepCall) -> Any:
        """Run a call of the user's function."""
        with contextlib.ExitStack() as stack:
            for _, module in call.reached().every_module():
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(self._calls_compiled(module))
            return call.function(*call.args, **call.kwargs)

    @contextlib.contextmanager
    def _calls_compiled(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """In this block calls of a DDP module go to its compiled form."""
        if id(ddp) not in self._compiled:
            self._compiled[id(ddp)] = ddpopt_compile(ddp, backend=self._backend)
        compiled, own = self._compiled[id(ddp)], vars(ddp)
        before, entered = own.get("forward"), False

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal entered
            if entered:  # the compiled form calls the module itself
                return cast(Any, type(ddp)).forward(ddp, *args, **kwargs)
            entered = True
            try:
                return compiled(*args, **kwargs)
            finally:
                entered = False

        own["forward"] = forward
        try:
            yield
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before
