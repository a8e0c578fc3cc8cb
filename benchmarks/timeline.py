"""Draw one training step of each mode on one time axis.

The picture has two rows for each mode: what the rank computes, and below it what is on the network, each
all-reduce from when its transfer starts to when it ends. gloo transfers two at a time.

Invariant: the picture shows a trace's own times, and nothing that is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree import ElementTree

from benchmarks.step_trace import Span, Trace

WIDTH, LEFT, RIGHT, TOP = 1000, 90, 60, 78
ROW, GAP, PITCH = 22, 5, 84
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.inside { font-size: 11px; fill: #ffffff; text-anchor: middle }
.title { font-weight: 600; font-size: 15px }
.end { text-anchor: end }
.middle { text-anchor: middle }
.card { fill: #ffffff }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.limit { stroke: #cf222e; stroke-width: 1.5; stroke-dasharray: 5 4 }
.launch { stroke: #1f2328; stroke-width: 1.5 }
.forward { fill: #57606a }
.backward { fill: #0969da }
.waiting { fill: #b6d4f5 }
.update { fill: #8250df }
.transfer { fill: #1a7f37; stroke: #ffffff }
@media (prefers-color-scheme: dark) {
text, .inside { fill: #f0f6fc }
.small { fill: #9198a1 }
.card { fill: #0d1117 }
.grid { stroke: #3d444d }
.limit { stroke: #ff7b72 }
.launch { stroke: #f0f6fc }
.forward { fill: #656c76 }
.backward { fill: #1f6feb }
.waiting { fill: #1d3557 }
.update { fill: #8957e5 }
.transfer { fill: #238636; stroke: #0d1117 }
}
"""


def tracks(transfers: Sequence[Span]) -> list[int]:
    """Give each transfer the first track that is free when it starts.

    >>> tracks([(0, 5), (1, 9), (5, 7), (6, 8)])
    [0, 1, 0, 2]
    """
    free: list[float] = []
    chosen = []
    for start, end in transfers:
        track = next((number for number, since in enumerate(free) if since <= start), len(free))
        free[track : track + 1] = [end]
        chosen.append(track)
    return chosen


def draw(title: str, traces: Mapping[str, Trace], limit_ms: float | None) -> str:
    """Draw one step of each mode.

    Args:
        title: stands above the picture.
        traces: by mode, from top to bottom.
        limit_ms: what no step can be faster than; a line. None: there is no line.

    Returns:
        An SVG document, legible on light and on dark pages.
    """
    return _Picture(title, traces, limit_ms).text()


class _Picture:
    def __init__(self, title: str, traces: Mapping[str, Trace], limit_ms: float | None) -> None:
        self._longest = max(max(trace.update[1] for trace in traces.values()), limit_ms or 0.0, 1.0)
        self._bottom = TOP + PITCH * len(traces)
        size = {"width": str(WIDTH), "height": str(self._bottom + 34)}
        box = f"0 0 {size['width']} {size['height']}"
        self._root = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "role": "img", **size}
        )
        ElementTree.SubElement(self._root, "title").text = title
        ElementTree.SubElement(self._root, "style").text = STYLE
        self._add("rect", "card", rx=8, **{key: float(value) for key, value in size.items()})
        self._write(title, 16, 26, "title")
        self._draw_legend(limit_ms is not None)
        self._draw_axis()
        for number, (mode, trace) in enumerate(traces.items()):
            self._draw_mode(mode, trace, TOP + PITCH * number)
        if limit_ms is not None:
            self._rule(limit_ms, "limit", TOP - 8, self._bottom)

    def text(self) -> str:
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _draw_legend(self, with_limit: bool) -> None:
        entries = [
            ("forward", "forward"),
            ("backward", "backward"),
            ("waiting", "backward waits for the network"),
            ("update", "optimizer"),
            ("transfer", "all-reduce of a bucket"),
        ]
        x = 16.0
        for kind, words in entries:
            self._add("rect", kind, x=x, y=42, width=12, height=12)
            self._write(words, x + 17, 52, "small")
            x += 40 + 6.1 * len(words)
        lines = [("launch", "its launch"), *([("limit", "physical limit")] if with_limit else [])]
        for kind, words in lines:
            self._add("line", kind, x1=x + 6, x2=x + 6, y1=40, y2=56)
            self._write(words, x + 14, 52, "small")
            x += 37 + 6.1 * len(words)

    def _draw_axis(self) -> None:
        for time in _ticks(self._longest):
            self._rule(time, "grid", TOP - 6, self._bottom)
            self._write(f"{time:g} ms", self._x(time), self._bottom + 18, "small middle")

    def _draw_mode(self, mode: str, trace: Trace, y: float) -> None:
        self._write(mode, LEFT - 12, y + 16, "end")
        self._write("network", LEFT - 12, y + 2 * ROW + GAP - 6, "small end")
        self._span("forward", trace.forward, y, ROW)
        self._span("backward", (trace.backward[0], trace.computed), y, ROW)
        self._span("waiting", (trace.computed, trace.backward[1]), y, ROW)
        self._span("update", trace.update, y, ROW)
        end = trace.update[1]
        self._write(f"{end:.0f} ms", self._x(end) + 6, y + 16, "")
        for launch in trace.launches:
            self._rule(launch, "launch", y + ROW - 5, y + ROW + GAP)
        rows = tracks(trace.transfers)
        for bucket, (transfer, row) in enumerate(zip(trace.transfers, rows, strict=True)):
            top = y + ROW + GAP + row * (ROW - 5)
            self._span("transfer", transfer, top, ROW - 6)
            if self._x(transfer[1]) - self._x(transfer[0]) > 14:
                middle = (self._x(transfer[0]) + self._x(transfer[1])) / 2
                self._write(str(bucket), middle, top + 12, "inside")

    def _x(self, time: float) -> float:
        return LEFT + time / self._longest * (WIDTH - LEFT - RIGHT)

    def _span(self, kind: str, span: Span, y: float, height: float) -> None:
        width = max(self._x(span[1]) - self._x(span[0]), 0.0)
        self._add("rect", kind, x=self._x(span[0]), y=y, width=width, height=height)

    def _rule(self, time: float, kind: str, top: float, bottom: float) -> None:
        self._add("line", kind, x1=self._x(time), x2=self._x(time), y1=top, y2=bottom)

    def _write(self, words: str, x: float, y: float, kind: str) -> None:
        self._add("text", kind, x=x, y=y).text = words

    def _add(self, tag: str, kind: str, **numbers: float) -> ElementTree.Element:
        values = {name: f"{number:.1f}".removesuffix(".0") for name, number in numbers.items()}
        return ElementTree.SubElement(self._root, tag, {**({"class": kind} if kind else {}), **values})


def _ticks(longest: float) -> Iterator[float]:
    """Round times, at most nine."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, longest) if longest / step <= 9)
    time = 0.0
    while time <= longest:
        yield time
        time += step
