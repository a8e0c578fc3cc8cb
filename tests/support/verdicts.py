"""Verdicts of every kind, for the tests of their reports."""

from dataclasses import replace

from ddpopt.judge.engines import modes
from ddpopt.judge.verdict import Finding, Location, Measured, Rung, SeenBucket, Status, Trial, Verdict

ENVIRONMENT = {"torch": "2.13.0", "ddpopt": "0.1.0", "python": "3.11.2", "device": "cpu", "platform": "Linux"}
BITWISE = "an aot_eager gradient equals eager's in every bit"
ONCE = "every planned bucket is reduced exactly once per backward"
TWICE = "bucket 1 was reduced 2 times in step 2 of rank 0, expected 1"
STACK = 'rank 1 died with signal 9\nFile "model.py", line 7, in forward\n  return self.layer(x)'
MODES = tuple(mode.name for mode in modes.MODES)
CASES = ("linears", "gpt", "tied", "batch_norm", "mixed_dtypes", "unused")

BUCKETS = (
    SeenBucket(0, ("layers.1.weight", "layers.1.bias"), 4 * 2**20, "float32"),
    SeenBucket(1, ("layers.0.weight", "layers.0.bias"), 2**20, "float32"),
)


def measured(parameter: str, bucket: int, ulps: float = 0.0, error: float = 0.0) -> tuple[Measured, ...]:
    return (
        Measured(parameter, "L0", bucket, ulps=ulps, error=error, bound=0.0, rank=1, step=2),
        Measured(parameter, "L1", bucket, ulps=1.0, error=1e-8, bound=4e-8, rank=1, step=2),
    )


def ok_trial(case: str = "pkg.module:model", mode: str = "ddpopt-inline", option: str = "default") -> Trial:
    seen = (each for bucket in BUCKETS for name in bucket.params for each in measured(name, bucket.index))
    return Trial(
        *(case, mode, option, "aot_eager", Status.OK),
        levels=("L3", "L0", "L1"),
        notes=("L2 needs Inductor, so it was not applied",),
        measured=tuple(seen),
        buckets=BUCKETS,
        graphs=1,
        seconds=1.25,
    )


def wrong_trial(case: str = "pkg.module:model", mode: str = "ddpopt-split", option: str = "default") -> Trial:
    message = "layers.0.weight: expected eager's gradient, got one that is 512 ULPs away at [3, 4]"
    return replace(
        ok_trial(case, mode, option),
        status=Status.WRONG,
        findings=(
            Finding("L0", BITWISE, message, 1, 2, "layers.0.weight", 1, ulps=512.0, error=3e-5, bound=0.0),
            Finding("L3", ONCE, TWICE, 0, 2, bucket=1),
        ),
        measured=(
            *measured("layers.1.weight", 0),
            *measured("layers.1.bias", 0),
            *measured("layers.0.weight", 1, ulps=512.0, error=3e-5),
            *measured("layers.0.bias", 1),
        ),
    )


def broken_trial(case: str = "pkg.module:model", mode: str = "torch", option: str = "default") -> Trial:
    return Trial(case, mode, option, "aot_eager", Status.BROKEN, STACK, seconds=30.0)


def impossible_trial(case: str = "pkg.module:model", mode: str = "eager", option: str = "mixed") -> Trial:
    reason = "eager itself cannot: RuntimeError: cpu backend doesn't support events"
    return Trial(case, mode, option, "", Status.NOT_POSSIBLE, reason)


def verdict(*trials: Trial, location: Location | None = None, target: str = "pkg.module:model") -> Verdict:
    return Verdict(target, 2, trials, ENVIRONMENT, location)


def location() -> Location:
    return Location(
        rungs=(
            Rung("eager, DDP", agrees=None, detail="refused: no such option"),
            Rung("aot_eager, no DDP", agrees=True),
            Rung("aot_eager, DDP", agrees=False, detail="layers.0.weight, 512 ULPs"),
        ),
        layer="what ddpopt does around the compiled code",
        segments=("graph 0, segment 1: linear, relu",),
        script="repro_linears.py",
        reproduces=True,
    )


def all_kinds() -> Verdict:
    """One trial of each kind."""
    return verdict(ok_trial(), wrong_trial(), broken_trial(), impossible_trial(), location=location())


def matrix(options: int) -> Verdict:
    """All modes under so many options, of which torch's is wrong under the first."""
    named = [f"option_{index:02d}_with_a_name" for index in range(options)]
    trials = (_sample(case, mode, option) for case in CASES for option in named for mode in MODES)
    return verdict(*trials, target="matrix")


def _sample(case: str, mode: str, option: str) -> Trial:
    if (mode, option) == ("torch", "option_00_with_a_name"):
        return wrong_trial(case, mode, option)
    trial = ok_trial(case, mode, option)
    return replace(trial, backend="" if mode == "eager" else trial.backend)


LOCATED = verdict(wrong_trial(), location=location())
EVERY = [verdict(), verdict(ok_trial()), LOCATED, all_kinds(), matrix(options=3)]
