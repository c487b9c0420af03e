"""The chart of `bench.py fleet`: goodput by load, a panel per workload, a line per rule."""

from __future__ import annotations

from collections.abc import Mapping

from router.commands.demo.comparison_chart import FAINT, MARGIN, WIDTH, svg_document, svg_text

Lines = dict[str, list[tuple[float, float]]]
"""Points of load and goodput by rule."""
COLOURS = ("#3f51b5", "#c2571a", "#2e7d32", "#8e24aa", "#00838f", "#9aa5b8", "#b71c1c", "#6d4c41")
PANEL_HEIGHT, AXIS_WIDTH = 220, 36


def goodput_chart(workloads: Mapping[str, Lines]) -> str:
    """Return the SVG."""
    top = MARGIN + 14.0
    parts = [svg_text(MARGIN, top, "Goodput by load", 18, bold=True)]
    rules = list(dict.fromkeys(rule for rules in workloads.values() for rule in rules))
    colours = {rule: COLOURS[number % len(COLOURS)] for number, rule in enumerate(rules)}
    for rule, colour in colours.items():
        top += 20
        parts.append(f'<rect x="{MARGIN}" y="{top - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(svg_text(MARGIN + 18, top, rule, 13))
    for name, lines in workloads.items():
        top += 40
        parts.append(svg_text(MARGIN, top, name, 14, bold=True))
        parts += _panel(lines, colours, top + 14)
        top += PANEL_HEIGHT + 34
    return svg_document(top + MARGIN, "Goodput by load", ", ".join(rules), parts)


def _panel(lines: Lines, colours: Mapping[str, str], top: float) -> list[str]:
    loads = sorted({load for points in lines.values() for load, _ in points})
    lowest = min(goodput for points in lines.values() for _, goodput in points)
    floor = int(10 * min(lowest, 0.9)) / 10
    left, width = MARGIN + AXIS_WIDTH, WIDTH - 2 * MARGIN - AXIS_WIDTH
    bottom, span = top + PANEL_HEIGHT, (loads[-1] - loads[0]) or 1.0

    def place(load: float, goodput: float) -> tuple[float, float]:
        high = (goodput - floor) / (1 - floor) * PANEL_HEIGHT
        return left + (load - loads[0]) / span * width, bottom - high

    parts = []
    for tenth in range(round(10 * floor), 11):
        y = place(loads[0], tenth / 10)[1]
        parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="#d9dee6"/>')
        parts.append(svg_text(MARGIN, y + 4, f"{tenth / 10:.1f}", 12, FAINT))
    for load in loads:
        parts.append(svg_text(place(load, floor)[0] - 8, bottom + 18, f"{load:g}", 12, FAINT))
    for rule, points in lines.items():
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in sorted(points))
        look = f'fill="none" stroke="{colours[rule]}" stroke-width="2"'
        parts.append(f'<polyline points="{path}" {look}/>')
    return parts
