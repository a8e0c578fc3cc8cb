"""ddpopt.tuning.comparing: which buckets are written."""

import json
import random

import pytest

from ddpopt.planning.bucket_rule import ParamSpec
from ddpopt.planning.plan import Plan
from ddpopt.tuning.comparing import A_TURN, TURNS, Row, Tuned, gain_of
from ddpopt.tuning.records import Gradient, Link, Profile
from ddpopt.tuning.simulate import simulate
from ddpopt.tuning.tune import plan_of, tune

SPECS = [ParamSpec(f"p{index}", 1 << 20, "float32", "cpu") for index in range(4)]
PROFILE = Profile(
    tuple(Gradient(spec, 0.01 * place) for place, spec in enumerate(SPECS)), 0.01, 0.04, 0.01, "inline", 2, {}
)
LINK = Link(1e-3, 1e-8, 0.0, 1.0, 0.05, "gloo", 2, {})
ONE, EACH = plan_of([SPECS], "all"), plan_of([[spec] for spec in SPECS], "each")


def steps(center_s: float, spread_s: float, seed: int) -> tuple[float, ...]:
    """Measured steps; a few are far longer, and later ones are slower, as on a machine in use."""
    draw = random.Random(seed)
    return tuple(
        center_s
        + 0.02 * place / (TURNS * A_TURN)
        + draw.uniform(-spread_s, spread_s)
        + (draw.random() < 0.05)
        for place in range(TURNS * A_TURN)
    )


def tuned(plan: Plan, default: Plan, gain_s: float, seed: int = 0, link: Link | None = None) -> Tuned:
    """A result in which the tuned plan gains so much."""
    measured = steps(0.1, 0.004, 2 * seed), steps(0.1 - gain_s, 0.004, 2 * seed + 1)
    rows = [
        Row(name, each, simulate(each, PROFILE, LINK), own)
        for name, each, own in zip(("DDP's default", "tuned"), (default, plan), measured, strict=True)
    ]
    return Tuned(PROFILE, LINK, tuple(rows), gain_of(rows, link))


def test_a_plan_that_is_faster_beyond_noise_is_written() -> None:
    for seed in range(50):
        found = tuned(EACH, ONE, 0.004, seed)
        assert found.gain.is_won
        assert Plan.from_json(found.to_json()) == EACH
        assert json.loads(found.to_json())["chosen"] == "tuned"
        assert found.gain.gain_s == pytest.approx(0.004, abs=0.003)


def test_noise_is_taken_for_a_gain_rarely() -> None:
    won = [tuned(EACH, ONE, 0.0, seed).gain.is_won for seed in range(200)]
    assert sum(won) <= 200 * 0.05  # 2.5 % are expected


def test_a_plan_that_its_own_data_calls_slower_is_not_written() -> None:
    found = tuned(ONE, EACH, 0.01)
    assert found.gain.gain_s > found.gain.noise_s
    assert not found.gain.is_won
    assert Plan.from_json(found.to_json()) == EACH
    assert str(found.gain).endswith(" longer is predicted")


def test_the_same_buckets_gain_nothing() -> None:
    rows = tuned(EACH, EACH, 0.0).rows
    same = [Row(row.name, row.plan, row.predicted, rows[0].measured_s) for row in rows]
    assert not gain_of(same, None).is_won


def test_with_a_link_from_a_file_the_prediction_counts() -> None:
    found = tuned(EACH, ONE, -0.02, link=LINK)
    assert found.gain.is_won
    assert not found.gain.is_measured
    assert found.gain.gain_s == simulate(ONE, PROFILE, LINK).step_s - simulate(EACH, PROFILE, LINK).step_s


def test_tuning_again_with_what_was_written_gives_the_same_plan() -> None:
    plan = tune(PROFILE, LINK)
    text = tuned(plan, ONE, 0.01).to_json()
    assert tune(Profile.from_json(text), Link.from_json(text)) == Plan.from_json(text)
