"""What is smaller than a drawn model: the same without a step, with a simpler one, or with plainer sizes.

Any value is a valid model, so nothing here knows what a step does. Invariant: each candidate is strictly
smaller by `weight`, so that taking one after the other comes to an end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ddpopt.testing.drawn import BLOCKS, DrawnModel, Step, step
from ddpopt.testing.drawn.forms import CHOICES

_PLAIN = DrawnModel()
_CHOSEN = (*CHOICES, "joined", "seed")
"""Fields with a plain value."""
_WIDTHS = (4, 8)
_CAPS = (2**20, 1)
"""One bucket for all, or one for each parameter: what lies between takes thought to read."""
_ORDER = {name: place for place, name in enumerate(BLOCKS)}


def weight(model: DrawnModel) -> tuple[float, ...]:
    """How large a model is: steps first, then which they are, then sizes; smaller is better to read."""
    steps = list(model.all_steps())
    return (
        len(steps),
        sum(_order(each.block) for each in steps),
        sum(_unusual(each) for each in steps),
        sum(sum(each.reads) for each in steps),
        sum(getattr(model, name) != getattr(_PLAIN, name) for name in _CHOSEN),
        len(model.batches),
        sum(model.batches),
        model.width,
        _CAPS.index(model.cap_bytes) if model.cap_bytes in _CAPS else len(_CAPS),
    )


def smaller(model: DrawnModel) -> Iterator[DrawnModel]:
    """Each model that is smaller by one change, or by many at once; the most promising first."""
    seen = {repr(model)}
    for candidate in _candidates(model):
        if repr(candidate) not in seen and weight(candidate) < weight(model):
            seen.add(repr(candidate))
            yield candidate


def keeping(steps: Sequence[Step], places: Sequence[int]) -> tuple[Step, ...]:
    """The steps at `places`, each of which reads what it has read before, as far as that is kept.

    Steps within others, outputs, and reads that count round keep their numbers.
    """
    gone = set(range(len(steps))) - set(places)

    def nearer(place: int, back: int) -> int:
        return back - sum(other in gone for other in range(place - back, place))

    return tuple(
        replace(steps[place], reads=tuple(nearer(place, back) for back in steps[place].reads))
        for place in places
    )


def _candidates(model: DrawnModel) -> Iterator[DrawnModel]:
    yield from _many_at_once(model)
    for steps in _fewer(model.steps):
        yield replace(model, steps=steps)
    for outputs in _fewer(model.outputs):
        yield replace(model, outputs=outputs)
    for name in _CHOSEN:
        yield replace(model, **{name: getattr(_PLAIN, name)})
    for batches in ((2,), model.batches[:1], (2, 3)):
        yield replace(model, batches=batches)
    for width in _WIDTHS:
        yield replace(model, width=width)
    for cap in _CAPS:
        yield replace(model, cap_bytes=cap)
    for steps in _plainer(model.steps, "step"):
        yield replace(model, steps=steps)
    for outputs in _plainer(model.outputs, "output"):
        yield replace(model, outputs=outputs)


def _many_at_once(model: DrawnModel) -> Iterator[DrawnModel]:
    """What is plain but for its steps, and steps that are plain themselves."""
    plain = replace(model, outputs=(), **{name: getattr(_PLAIN, name) for name in CHOICES})
    steps = tuple(map(_with_plain_options, model.steps))
    for cap in (*_CAPS, model.cap_bytes):
        small = replace(plain, seed=_PLAIN.seed, batches=(2,), width=_WIDTHS[0], cap_bytes=cap)
        yield replace(small, steps=steps)
        yield small
    yield replace(plain, steps=steps)
    yield plain
    yield replace(model, steps=steps)


def _with_plain_options(each: Step) -> Step:
    block = BLOCKS[each.block]
    options = tuple((name, next(iter(block.options[name]))) for name, _ in each.options)
    return replace(each, options=options, body=tuple(map(_with_plain_options, each.body)))


def _fewer(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Without one step or its body; what is within is tried too."""
    for place, each in enumerate(steps):
        before, after = steps[:place], steps[place + 1 :]
        yield keeping(steps, [other for other in range(len(steps)) if other != place])
        yield before + after
        if each.body:
            yield (*before, replace(each, body=()), *after)
            yield (*before, *each.body, *after)
        for body in _fewer(each.body):
            yield (*before, replace(each, body=body), *after)


def _plainer(steps: tuple[Step, ...], kind: str) -> Iterator[tuple[Step, ...]]:
    """With one step's options, reads or block replaced by simpler ones."""
    for place, each in enumerate(steps):
        before, after = steps[:place], steps[place + 1 :]
        for other in _simpler(each, kind):
            yield (*before, other, *after)
        for body in _plainer(each.body, "step"):
            yield (*before, replace(each, body=body), *after)


def _simpler(each: Step, kind: str) -> Iterator[Step]:
    block = BLOCKS[each.block]
    yield step(each.block, body=each.body)
    for name, _ in each.options:
        plain = tuple((n, next(iter(block.options[n])) if n == name else v) for n, v in each.options)
        yield replace(each, options=plain)
    for place in range(len(each.reads)):
        yield replace(each, reads=(*each.reads[:place], 0, *each.reads[place + 1 :]))
    if not each.body:
        yield step(next(name for name, other in BLOCKS.items() if other.place == kind))


def _unusual(each: Step) -> int:
    block = BLOCKS[each.block]
    return sum(value != next(iter(block.options[name])) for name, value in each.options)


def _order(block: str) -> int:
    """Where a block stands among those that are registered, which others may be at any time."""
    return _ORDER.get(block, len(_ORDER))
