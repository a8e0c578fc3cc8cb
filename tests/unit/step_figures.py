"""Figures of `benchmarks.step` as no run would give them: round numbers."""

from benchmarks.step_rank import Figures

PARTS = {
    "forward": 2.0,
    "backward": 4.0,
    "update": 1.0,
    "first_bucket": 0.25,
    "comm": 9.0,
    "last_bucket": 1.5,
}
"""A step of at least 13 seconds."""


def figures(**steps_s: list[float]) -> Figures:
    samples = len(next(iter(steps_s.values())))
    return Figures(
        model="linears",
        bucket_bytes=[4 * 2**20] * 8,
        graphs={},
        steps_s=steps_s,
        parts={name: [value] * samples for name, value in PARTS.items()},
        exposed={mode: [0.25] for mode in steps_s},
        peak_bytes=dict.fromkeys(steps_s, 2 * 2**20),
    )
