"""Pictures of steps, predicted or observed: a trace that Perfetto opens, an SVG, a page with it, and text.

All are drawn from the same spans of time; the templates `figure.svg.jinja` and `page.html.jinja` have sizes
and colors. Invariant: a picture shows the times of its timelines, loads nothing, and escapes every name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddpopt.tuning.records import ms
from ddpopt.tuning.simulate import Sent, Timeline

COLUMNS = 60
"""Width of the text."""
LABELS = 9
"""Width of the names of its rows."""
NOT_XML = re.compile(r"[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may contain, as in some names of parameters."""
MARKS = {"forward": "f", "backward": "b", "waiting": ".", "update": "u"}
LEGEND = """f forward, b backward, . waiting, u update; # exposed;
the last digit of a bucket: sent while backward computes"""


@dataclass(frozen=True)
class Period:
    """A span of time in a picture. Times are in seconds after the step began.

    Attributes:
        name: ``"forward"``, ``"backward"``, ``"waiting"`` (for the network) or ``"update"`` in the row of
            computation; ``"bucket 0"``, … until it is complete, and while it is sent.
        begin_s: when it begins.
        end_s: when it ends.
        hidden_s: until when backward's computation hides it; `end_s` if there is nothing to hide.
        sent: the bucket, if it is of one.
    """

    name: str
    begin_s: float
    end_s: float
    hidden_s: float
    sent: Sent | None = None


def spans(timeline: Timeline) -> dict[str, list[Period]]:
    """What a step computes, fills and sends, by the row of the picture; each row is in order of time."""
    ends = (0.0, timeline.forward_s, timeline.backward_s, timeline.reduced_s, timeline.step_s)
    phases = zip(MARKS, pairwise(ends), strict=True)
    rows = {"compute": [Period(name, begin, end, end) for name, (begin, end) in phases if begin < end]}
    rows |= {"buckets": [], "network": []}
    filled = timeline.forward_s
    for sent in timeline.buckets:
        begin = filled
        filled = max(filled, sent.ready_s)
        name = f"bucket {sent.index}"
        hidden = min(max(sent.sent_s, timeline.backward_s), sent.back_s)
        rows["buckets"].append(Period(name, begin, filled, filled, sent))
        rows["network"].append(Period(name, sent.sent_s, sent.back_s, hidden, sent))
    return rows


def lanes(row: Sequence[Period]) -> list[list[Period]]:
    """The spans of a row in as few lists as possible, none of which has two that overlap."""
    found: list[list[Period]] = []
    for span in sorted(row, key=lambda span: span.begin_s):
        free = next((lane for lane in found if lane[-1].end_s <= span.begin_s), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found


def chrome_trace(predicted: Timeline, observed: Sequence[Timeline] = ()) -> str:
    """A trace in the Chrome format, for https://ui.perfetto.dev or chrome://tracing.

    Args:
        predicted: shown for each rank.
        observed: one for each rank; empty if nothing was observed.

    Returns:
        JSON text. Each rank is a process, with a thread for each row; all-reduces that overlap have one each.
        What nothing hides is an event ``exposed`` within that of its bucket. Times are in whole microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank in range(max(1, len(observed))):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        steps = [("predicted", predicted), *(("observed", step) for step in observed[rank : rank + 1])]
        rows = [(f"{of} {row}", own) for of, step in steps for row, own in spans(step).items()]
        tracks = [(title, lane) for title, own in rows for lane in lanes(own)]
        for track, (title, lane) in enumerate(tracks, 1):
            on = {"pid": rank, "tid": track}
            events.append({"ph": "M", "name": "thread_name", "args": {"name": title}, **on})
            events.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": track}, **on})
            for span in lane:
                parts = [(span.name, span.begin_s), ("exposed", span.hidden_s)]
                for name, begin_s in parts if span.hidden_s < span.end_s else parts[:1]:
                    begin = round(begin_s * 1e6)
                    end = round(span.end_s * 1e6)
                    at = {"ts": begin, "dur": end - begin, "args": asdict(span.sent) if span.sent else {}}
                    events.append({"ph": "X", "name": name, **at, **on})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def svg(timelines: Mapping[str, Timeline]) -> str:
    """Timelines on one axis, as an SVG that follows the theme of the reader's system.

    Args:
        timelines: from top to bottom, by what they show, for instance ``"tuned"``.

    Returns:
        A whole SVG document, which loads nothing.
    """
    longest_s = max((timeline.step_s for timeline in timelines.values()), default=0.0) or 1.0
    ticks = [digit * 10.0**power for power in range(-9, 12) for digit in (1, 2, 5)]
    apart_s = next(tick for tick in ticks if longest_s <= 10 * tick)
    scale = {"longest_s": longest_s, "apart_s": apart_s}
    return _rendered("figure.svg.jinja", timelines=timelines, spans=spans, lanes=lanes, ms=ms, **scale)


def page(title: str, timelines: Mapping[str, Timeline], words: str = "") -> str:
    """A page with the picture of `svg`.

    Args:
        title: of the page.
        timelines: as for `svg`.
        words: shown below the picture, such as a table.

    Returns:
        A whole HTML document in UTF-8, well-formed as XML, which loads nothing and has no script.
    """
    return _rendered("page.html.jinja", title=title, figure=svg(timelines), words=words)


def _rendered(template: str, **names: object) -> str:
    loader = PackageLoader("ddpopt", "tuning")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    return NOT_XML.sub("\ufffd", environment.get_template(template).render(**names))


def text(timelines: Mapping[str, Timeline]) -> str:
    """Timelines on one axis in ASCII, `COLUMNS` wide: below its title each one's computation and network.

    Args:
        timelines: from top to bottom, by what they show.

    Returns:
        Lines, the last one without a newline. What is shorter than a column fills one.
    """
    width = COLUMNS - LABELS
    per_s = (width - 0.5) / (max((step.step_s for step in timelines.values()), default=0.0) or 1.0)
    lines = []
    for title, step in timelines.items():
        lines.append(f"{title}: {ms(step.step_s)}, {ms(step.exposed_s)} exposed")
        for row in ("compute", "network"):
            cells = [" "] * width
            for span in spans(step)[row]:
                parts = [(span.name, span.begin_s, span.hidden_s), ("#", span.hidden_s, span.end_s)]
                for name, begin_s, end_s in parts:
                    first = int(begin_s * per_s)
                    after = int(end_s * per_s) + (begin_s < end_s)
                    cells[first:after] = MARKS.get(name, name[-1]) * (after - first)
            lines.append(f"{row:{LABELS}}{''.join(cells)}".rstrip())
    return "\n".join([*lines, LEGEND])
