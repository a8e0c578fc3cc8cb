"""How far a figure may stray from the baseline's before the gate says so.

Plans, graphs and collectives are exact. What a processor's arithmetic or a busy machine moves has a band, and
a figure within its band leaves the baseline as it is. So no drift adds up, and an unchanged commit gives an
unchanged file.

Invariant: a band is one-sided; what gets better is a remark.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpopt.gate.figures import CaseFigures, Figures, ModeFigures, Ratio

PLANNING = "planning"


@dataclass(frozen=True)
class Bands:
    """How far figures may stray; kept in the baseline, where a reviewer sees them.

    Attributes:
        potential: by how much the overlap potential may fall.
        margin_factor: how many times a margin may grow, …
        margin_floor: … and up to what share of its bound it may in any case.
        planning_factor: how many times the ratio of planning times may grow.
        compile_factor: how many times the ratio of compile times may grow.
    """

    potential: float = 0.02
    margin_factor: float = 2.0
    margin_floor: float = 0.1
    planning_factor: float = 1.6
    compile_factor: float = 1.3

    def lowest_potential(self, before: float) -> float:
        """What the overlap potential must at least be."""
        return before - self.potential

    def highest_margin(self, before: float) -> float:
        """What a margin may at most be; above 1 the run is wrong, whatever the baseline says.

        >>> Bands().highest_margin(0.0), Bands().highest_margin(0.4), Bands().highest_margin(0.7)
        (0.1, 0.8, 1.0)
        """
        return min(1.0, max(self.margin_floor, before * self.margin_factor))

    def highest_ratio(self, what: str, before: float) -> float:
        """What a ratio of times may at most be.

        Args:
            what: ``"planning"``, or anything else for compile times.
            before: the baseline's.
        """
        return before * self._factor(what)

    def lowest_ratio(self, what: str, before: float) -> float:
        """Below what a ratio of times is better than the baseline's, and not only luckier."""
        return before / self._factor(what)

    def _factor(self, what: str) -> float:
        return self.planning_factor if what == PLANNING else self.compile_factor


def settled(before: Figures, now: Figures, bands: Bands) -> Figures:
    """Take what was measured, but keep the baseline's figure where the new one is within its band.

    Args:
        before: what the baseline keeps.
        now: what was measured.
        bands: how far a figure may stray.

    Returns:
        What to write: equal to `before` where nothing moved.
    """
    cases = {
        name: _settled_case(before.cases[name], case, bands) if name in before.cases else case
        for name, case in now.cases.items()
    }
    ratios = {
        name: {what: _settled_ratio(before, name, what, ratio, bands) for what, ratio in found.items()}
        for name, found in now.ratios.items()
    }
    return Figures(cases, ratios, now.tests)


def _settled_case(before: CaseFigures, now: CaseFigures, bands: Bands) -> CaseFigures:
    modes = {
        name: _settled_mode(before.modes[name], mode, bands) if name in before.modes else mode
        for name, mode in now.modes.items()
    }
    return replace(now, modes=modes)


def _settled_mode(before: ModeFigures, now: ModeFigures, bands: Bands) -> ModeFigures:
    keeps = abs(now.potential - before.potential) <= bands.potential
    margins = {
        level: _settled_margin(before.margins.get(level), share, bands)
        for level, share in now.margins.items()
    }
    return replace(now, potential=before.potential if keeps else now.potential, margins=margins)


def _settled_margin(before: float | None, now: float, bands: Bands) -> float:
    if before is None or not is_margin_kept(before, now, bands):
        return now
    return before


def is_margin_kept(before: float, now: float, bands: Bands) -> bool:
    """Whether a margin is neither worse nor much better than the baseline's."""
    return now <= bands.highest_margin(before) and before <= bands.highest_margin(now)


def _settled_ratio(before: Figures, name: str, what: str, now: Ratio, bands: Bands) -> Ratio:
    kept = before.ratios.get(name, {}).get(what)
    if isinstance(kept, str) or isinstance(now, str) or kept is None:
        return now
    return kept if bands.lowest_ratio(what, kept) <= now <= bands.highest_ratio(what, kept) else now
