"""What a public report has to do with a case: what went wrong upstream, and what torch does with it today.

A case that stems from a report against PyTorch carries one of these; the multi-rank tests run torch's own
optimizer as the report says and compare what happened, word for word. Invariant: ``torch_says`` is what was
measured with torch 2.13, never what was expected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Ask = Literal["compiled", "one piece", "overlap", "aligned", "recompiles", "products"]
"""What a report asks for beside eager DDP's gradients.

- ``compiled``: at least one graph is compiled.
- ``one piece``: the forward is compiled as one graph, whatever DDP's buckets are.
- ``overlap``: at least half of the buckets leave before the last compiled backward ends.
- ``aligned``: all buckets but the last one leave before that.
- ``recompiles``: after the second step nothing is compiled any more.
- ``products``: backward computes no more matrix products than in eager.
"""

Wrap = Literal["DDP", "compiled inside", "replicate", "nested"]
"""How a model is made data-parallel.

- ``DDP``: it is put into DDP, which is compiled.
- ``compiled inside``: it is compiled, and that is put into DDP.
- ``replicate``: by torch's composable ``replicate()``.
- ``nested``: as ``DDP``, with its submodule ``inner`` in a DDP of its own.
"""


@dataclass(frozen=True)
class Report:
    """A report against PyTorch that a case reproduces.

    Attributes:
        number: of the issue or pull request in pytorch/pytorch.
        upstream: one sentence: what went wrong there, or what was done about it.
        torch_passes: whether torch 2.13's own optimizer does what the report asks for.
        torch_says: what torch 2.13's own optimizer does with the case, as the test puts it.
        asks: what is right, beside gradients equal to those of eager DDP.
        nearest: how the case differs from the report, where that cannot run on CPU and gloo; else empty.
        backend: Dynamo backend under which torch and ddpopt are judged.
        settings: torch's settings under which both are judged: ``{"_dynamo.optimize_ddp": …}``.
        wrap: how the model is made data-parallel.
    """

    number: int
    upstream: str
    torch_passes: bool
    torch_says: str
    asks: tuple[Ask, ...] = ()
    nearest: str = ""
    backend: str = "aot_eager"
    settings: Mapping[str, Any] = field(default_factory=dict)
    wrap: Wrap = "DDP"
