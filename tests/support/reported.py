"""Running a case as its public report says, and what came of it, in words that a report can be held to."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.trace_rules
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch does not mark its re-exports
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ddpopt.cases.case import Case
from ddpopt.ranks.group import Ranks
from tests.support.models import averaged, roundings
from tests.support.reports import Report

STEPS = 4
# torch's optimizer fails at any smaller cap, whatever the model; that has a case of its own.
CAP_MB = 1
ROUNDINGS = 32
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
REDUCED = (torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.all_reduce_.default)
Compile = Callable[[Any], Any]


@dataclass
class Outcome:
    """What one run of a case did.

    Attributes:
        error: what it raised; empty if it went through.
        pieces: compiled backwards in the last step.
        buckets: buckets that DDP sent in the last step.
        early: those of them that were sent before the last compiled backward ended.
        later: graphs that were compiled after the second step.
        products: matrix products in the backward of the last step.
        gradients: of every step and parameter.
    """

    error: str = ""
    pieces: int = 0
    buckets: int = 0
    early: int = 0
    later: int = 0
    products: int = 0
    gradients: list[list[Tensor | None]] = field(default_factory=list)

    def distance(self, reference: "Outcome") -> float:
        """Of any gradient the farthest from the reference, in roundings of its largest element."""
        pairs = zip(self.gradients, reference.gradients, strict=True)
        distances = (roundings(a, b) for mine, others in pairs for a, b in zip(mine, others, strict=True))
        return max(distances, default=0.0)


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Counts matrix products and the all-reduces that torch's Python reducer makes of single gradients."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.products = self.reduced = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.products += func in PRODUCTS
        self.reduced += func in REDUCED
        return func(*args, **(kwargs or {}))


def run(case: Case, report: Report, ranks: Ranks, compile_: Compile | None) -> Outcome:
    """Train a case for a few steps: eagerly, or compiled by a function from a module to a callable."""
    torch._dynamo.reset()
    outcome, events = Outcome(), list[str]()
    settings = report.settings if compile_ is not None else {"_dynamo.optimize_ddp": False}
    with patched(settings):
        try:
            model, call = parallel(case, report, ranks, compile_, events)
            for step in range(STEPS):
                train_step(case.on(ranks.device), call, model, ranks.rank, step, events, outcome)
        except Exception as error:
            outcome.error = described(error)
        finally:
            # What torch leaves behind when its optimizer fails would let later modules fail too.
            DistributedDataParallel._active_ddp_module = None
            torch._dynamo.reset()
    return outcome


def train_step(
    case: Case, call: Any, model: nn.Module, rank: int, step: int, events: list[str], outcome: Outcome
) -> None:
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    loss = case.step(call, rank, step)
    outcome.later += torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs if step > 1 else 0
    events.clear()
    outcome.pieces = watch_pieces(loss, events)
    with ExitStack() as stack:
        # A mode hinders compilation, and backwards are compiled in the first steps.
        operators = stack.enter_context(Operators()) if step == STEPS - 1 else Operators()
        torch.autograd.backward(loss)
    outcome.products = operators.products
    outcome.buckets = events.count("bucket") + operators.reduced
    ends = [place for place, event in enumerate(events) if event == "piece"]
    outcome.early = events[: ends[-1]].count("bucket") if ends else 0
    outcome.gradients.append([p.grad.clone() if p.grad is not None else None for p in model.parameters()])
    model.zero_grad()


def parallel(
    case: Case, report: Report, ranks: Ranks, compile_: Compile | None, events: list[str]
) -> tuple[nn.Module, Any]:
    """Make a model data-parallel as the report says; return it, and what to call."""
    model: Any = case.model().to(ranks.device)
    arguments = {"bucket_cap_mb": CAP_MB, **case.ddp_kwargs}
    if "bucket_cap_mb_list" in case.ddp_kwargs:
        del arguments["bucket_cap_mb"]
    compiled = compile_ or (lambda module: module)
    if report.wrap == "replicate":
        replicate(model, **arguments)
        call, hooked = compiled(model), model
    elif report.wrap == "compiled inside":
        call = hooked = DistributedDataParallel(compiled(model), **arguments)
    else:
        if report.wrap == "nested":
            nest(model)
        hooked = DistributedDataParallel(model, **arguments)
        call = compiled(hooked)

    if not getattr(hooked, "_use_python_reducer", False):  # whose hooks take other arguments
        hooked.register_comm_hook(events, noting)
    return model, call


def noting(events: list[str], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that averages as DDP does, and notes that it was called."""
    events.append("bucket")
    group: Any = dist.group.WORLD
    return averaged(bucket, group)


def nest(model: Any) -> None:
    """Put the submodule ``inner`` into a DDP of its own, and tell the outer one to leave it alone."""
    model.inner = DistributedDataParallel(model.inner)
    names = [name for name, _ in model.named_parameters() if name.startswith("inner.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


def watch_pieces(loss: Tensor, events: list[str]) -> int:
    """Have every compiled backward say when it ends; return how many there are."""
    seen, waiting, pieces = set[Any](), [loss.grad_fn], 0
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if node.name().startswith("CompiledFunction"):
            pieces += 1
            node.register_hook(lambda *_: events.append("piece"))
    return pieces


@contextmanager
def patched(settings: Any) -> Iterator[None]:
    """Set torch's settings for a while, and take back what DDP with a Python reducer sets for good."""
    rules = torch._dynamo.trace_rules
    with ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch({}))
        for name, value in settings.items():
            package, _, key = name.partition(".")
            stack.enter_context(getattr(torch, package).config.patch({key: value}))
        yield
    rules.LEGACY_MOD_INLINELIST.discard("torch.nn.parallel.distributed")
    rules.get_legacy_mod_inlinelist.cache_clear()


def described(error: BaseException) -> str:
    """The innermost error by its type and its first line, without what only this process knows."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    if inner is not None:
        return described(inner)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:100].rstrip()}"


def sentence(outcome: Outcome, reference: Outcome, report: Report) -> str:
    """What a run did, in the words of ``Report.torch_says``."""
    if outcome.error:
        return f"raises {outcome.error}"
    words = [
        f"compiles {_counted(outcome.pieces, 'piece')}" if outcome.pieces else "compiles nothing",
        f"sends {outcome.early} of {outcome.buckets} buckets during backward",
        "wrong gradients" if outcome.distance(reference) > ROUNDINGS else "gradients as eager",
    ]
    if "recompiles" in report.asks:
        words.append(f"compiles {outcome.later} graphs after the second step")
    if "products" in report.asks:
        words.append(f"{outcome.products - reference.products} matrix products more than eager")
    return ", ".join(words)


def passes(outcome: Outcome, reference: Outcome, report: Report) -> bool:
    """Whether a run did what the report asks for."""
    if outcome.error or outcome.distance(reference) > ROUNDINGS:
        return False
    answers = {
        "compiled": outcome.pieces > 0,
        "one piece": outcome.pieces == 1,
        "overlap": 2 * outcome.early >= outcome.buckets > 0,
        "aligned": outcome.early >= outcome.buckets - 1,
        "recompiles": outcome.later == 0,
        "products": outcome.products <= reference.products,
    }
    return all(answers[ask] for ask in report.asks)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")
