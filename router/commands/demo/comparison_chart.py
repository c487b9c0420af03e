"""The chart of `disagg-router demo --compare` as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from html import escape

from router.commands.console import time_text
from router.commands.demo.comparison import ALONE, SHORTEST_S, SPLIT, Comparison

WIDTH, MARGIN = 760, 28
COLOURS = {ALONE: "#9aa5b8", SPLIT: "#3f51b5"}
INK, FAINT = "#1f2733", "#5b6675"
BAR_HEIGHT, BAR_GAP, ROW_GAP = 15, 3, 10
LABEL_WIDTH, VALUE_WIDTH = 40, 150
LINE_HEIGHT, LINE_CHARS = 16, 112


def chart(comparison: Comparison) -> str:
    """Return the chart: bars of each latency, the load and the machine."""
    parts: list[str] = []
    add, height = parts.append, MARGIN + 14
    add(svg_text(MARGIN, height, "One engine, or 1 prefill + 1 decode engine", 18, bold=True))
    height += 22
    add(svg_text(MARGIN, height, "Equal CPU, the same load. Lower is better.", 13, FAINT))
    height += 26
    place = MARGIN
    for setup, colour in COLOURS.items():
        add(_bar(place, height - 10, 12, 12, colour))
        add(svg_text(place + 18, height, setup, 13))
        place += 44 + 8 * len(setup)
    height += 14
    figures = comparison.figures()
    for name in dict.fromkeys(one.name for one in figures):
        rows = [one for one in figures if one.name == name]
        longest = max(SHORTEST_S, *(max(one.alone, one.split) for one in rows))
        height += 20
        add(svg_text(MARGIN, height, name, 14, bold=True))
        height += 8
        for one in rows:
            add(svg_text(MARGIN, height + BAR_HEIGHT + 3, one.share, 12, FAINT))
            for setup, value in ((ALONE, one.alone), (SPLIT, one.split)):
                left, room = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH - VALUE_WIDTH
                width = max(2.0, value / longest * room)
                add(_bar(left, height, width, BAR_HEIGHT, COLOURS[setup]))
                text = time_text(value) + (f"   {one.change}" if setup == SPLIT else "")
                add(svg_text(left + width + 8, height + 12, text, 12))
                height += BAR_HEIGHT + BAR_GAP
            height += ROW_GAP
    height += 8
    for text in comparison.notes():
        for line in textwrap.wrap(text, LINE_CHARS):
            height += LINE_HEIGHT
            add(svg_text(MARGIN, height, line, 11.5, FAINT))
    title = "TTFT and ITL of one engine, and of 1 prefill + 1 decode engine"
    description = f"{comparison.verdict()} {comparison.machine_text()}"
    return svg_document(height + MARGIN, title, description, parts)


def svg_document(height: float, title: str, description: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n"
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{height}"'
    return f'<rect x="{x}" y="{y}" {size} rx="2" fill="{colour}"/>'


def svg_text(
    x: float, y: float, text: str, size: float, colour: str = INK, *, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"{weight} '
        f'xml:space="preserve">{escape(text)}</text>'
    )
