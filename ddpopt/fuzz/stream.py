"""The sequence of models that a campaign judges, a block at a time.

A block depends only on its seed and number, never on a verdict. So equal seeds give equal campaigns, and a
resumed campaign draws its block again. Invariant: `drawn_block` is a function of its arguments.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, given, seed, settings

from ddpopt.testing.drawn import DrawnModel
from ddpopt.testing.strategies import models

RUN = 10
"""Models that Hypothesis draws in one run: after ten valid ones it continues with variants of each."""
SMALLEST = 2
"""The first models of a run are the simplest possible, or nearly so: one copy of them is enough."""
BLOCK = RUN - SMALLEST
"""Models in a block."""
STEPS = 6
"""The most steps of a model, without those in bodies: a model with more costs as much as two smaller ones."""


@dataclass(frozen=True)
class Source:
    """The source of a campaign's models.

    Attributes:
        seed: seed of the campaign.
        shard: index of this process among those of the campaign, on one machine or many.
        without: features that are not drawn.
    """

    seed: int
    shard: int = 0
    without: tuple[str, ...] = ()

    def seed_of(self, block: int) -> int:
        """The seed of one block."""
        text = f"{self.seed}/{self.shard}/{block}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def models(self, start: int = 0) -> Iterator[tuple[int, DrawnModel]]:
        """Yield all models from a place on, each with its place; never ends."""
        block = start // BLOCK
        while True:
            for place, model in enumerate(drawn_block(self, block), block * BLOCK):
                if place >= start:
                    yield place, model
            block += 1


def drawn_block(source: Source, number: int) -> list[DrawnModel]:
    """Draw one block of models.

    Args:
        source: the source.
        number: number of the block, from 0.

    Returns:
        `BLOCK` models.
    """
    drawn: list[DrawnModel] = []

    @seed(source.seed_of(number))
    @settings(
        max_examples=RUN,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(models(without=source.without, max_steps=STEPS))
    def keep(model: DrawnModel) -> None:
        drawn.append(model)

    # Hypothesis wraps it in a function without arguments
    draw: Callable[[], None] = keep
    draw()
    return drawn[:BLOCK] if number == 0 else drawn[SMALLEST:]


def fingerprint(source: Source) -> str:
    """Digest of the first models of a source: equal for campaigns that draw the same models."""
    return hashlib.sha256(repr(drawn_block(source, 0)).encode()).hexdigest()[:12]
