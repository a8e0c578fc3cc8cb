"""Parameters that get no gradient, found by backwards of the plain model on the inputs of several ranks.

Invariant: a parameter is called unused only if a backward left its gradient at None.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ddpopt.cases.case import Case
from ddpopt.doctor.diagnosis import Advice, Unused, Weight
from ddpopt.doctor.mode_run import undisturbed
from ddpopt.errors import NotJudgedError
from ddpopt.judge.rules.failing import in_words
from ddpopt.terminal.tables import names


def find_unused(case: Case, ranks: int, steps: int, tell: Callable[[str], None]) -> tuple[Unused, ...]:
    """Run the plain model, and record which trainable parameters get no gradient.

    Args:
        case: the case.
        ranks: the inputs of ranks 0 to ``ranks - 1`` are used.
        steps: the number of steps for each.
        tell: called with progress messages.

    Returns:
        The parameters without a gradient in some backward, in the order of ``named_parameters()``.

    Raises:
        NotJudgedError: the model fails in eager.
    """
    tell("eager, without DDP")
    missing: dict[str, list[tuple[int, int]]] = {}
    with undisturbed():
        model = case.model()
        for rank in range(ranks):
            for step in range(steps):
                for name in _without_gradient(case, model, rank, step):
                    missing.setdefault(name, []).append((rank, step))
    order = [name for name, _ in model.named_parameters() if name in missing]
    return tuple(Unused(name, tuple(missing[name]), len(missing[name]) == ranks * steps) for name in order)


def _without_gradient(case: Case, model: nn.Module, rank: int, step: int) -> Iterator[str]:
    model.zero_grad()
    try:
        case.step(model, rank, step).backward()  # type: ignore[no-untyped-call]  # of torch
    except Exception as error:
        raise NotJudgedError(
            f"{case.name}: expected the model to run in eager, without DDP, but with the inputs of rank "
            f"{rank}, step {step} it failed with {in_words(error)}; fix that step first"
        ) from error
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            yield name


def unused_findings(
    unused: Sequence[Unused], ignored: Sequence[str], ddp_kwargs: Mapping[str, Any], steps: int
) -> Iterator[Advice]:
    """Return findings on unused parameters and DDP's options for them.

    Args:
        unused: parameters without a gradient somewhere.
        ignored: the parameters that DDP ignores.
        ddp_kwargs: DDP's arguments.
        steps: the number of backwards with the inputs of each rank.
    """
    seen = [parameter for parameter in unused if parameter.name not in ignored]
    never = [parameter.name for parameter in seen if parameter.always]
    sometimes = [parameter for parameter in seen if not parameter.always]
    static, searching = (bool(ddp_kwargs.get(key)) for key in ("static_graph", "find_unused_parameters"))
    if never:
        yield _never(never, handled=static or searching)
    if sometimes:
        unsteady = any(_changes_with_step(parameter, steps) for parameter in sometimes)
        yield _sometimes(sometimes, unsteady=unsteady, static=static, searching=searching)
    if searching and not static and not sometimes:
        yield Advice(
            "options",
            Weight.SLOW,
            "find_unused_parameters=True, but every backward gave the same parameters a gradient. DDP "
            "searches the autograd graph in each step without need, and never rebuilds its buckets in the "
            "order in which gradients arrive.",
            "Leave it out, and freeze parameters that get no gradient; or give DDP static_graph=True.",
        )


def _never(never: Sequence[str], *, handled: bool) -> Advice:
    freeze = "Freeze them (parameter.requires_grad_(False)) or remove them from the model"
    if handled:
        return Advice(
            "parameters",
            Weight.SLOW,
            f"No backward gave these a gradient: {names(never)}. DDP sends zeros for them in each step.",
            f"{freeze} before the model is wrapped.",
        )
    return Advice(
        "parameters",
        Weight.WRONG,
        f"No backward gave these a gradient: {names(never)}. DDP waits for them, and raises an error in the "
        "second step.",
        f"{freeze} before the model is wrapped; or give DDP static_graph=True, if every step leaves out the "
        "same ones.",
    )


def _sometimes(sometimes: Sequence[Unused], *, unsteady: bool, static: bool, searching: bool) -> Advice:
    first = sometimes[0]
    rank, step = first.missing[0]
    what = (
        f"Some backwards gave these a gradient, and others did not: {names([p.name for p in sometimes])}. "
        f"For instance, {first.name} got none with the inputs of rank {rank}, step {step}."
    )
    if static and unsteady:
        what += " static_graph=True promises that each rank uses the same parameters in every step."
        take = "Give DDP find_unused_parameters=True instead of static_graph=True."
    elif not static and not searching:
        what += " DDP waits for all of them, and raises an error in the step after one is left out."
        take = "Give DDP find_unused_parameters=True, or use them in every step, with a weight of zero."
    else:
        return Advice("parameters", Weight.NOTE, what, "None: DDP's options allow for it.")
    return Advice("parameters", Weight.WRONG, what, take)


def _changes_with_step(parameter: Unused, steps: int) -> bool:
    """Whether some rank uses a parameter in one step and not in another."""
    ranks = [rank for rank, _ in parameter.missing]
    return any(ranks.count(rank) < steps for rank in ranks)
