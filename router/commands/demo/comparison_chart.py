"""The chart of `disagg-router demo --compare` as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
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
    parts, height = [], MARGIN + 14
    parts.append(
        svg_text(MARGIN, height, "One engine, or 1 prefill + 1 decode engine", 18, bold=True)
    )
    height += 22
    parts.append(svg_text(MARGIN, height, "Equal CPU, the same load. Lower is better.", 13, FAINT))
    height += 26
    place = MARGIN
    for setup, colour in COLOURS.items():
        parts.append(
            f'<rect x="{place}" y="{height - 10}" width="12" height="12" fill="{colour}"/>'
        )
        parts.append(svg_text(place + 18, height, setup, 13))
        place += 44 + 8 * len(setup)
    height += 14
    figures = comparison.figures()
    for name in dict.fromkeys(one.name for one in figures):
        rows = [one for one in figures if one.name == name]
        longest = max(SHORTEST_S, *(max(one.alone, one.split) for one in rows))
        height += 20
        parts.append(svg_text(MARGIN, height, name, 14, bold=True))
        height += 8
        for one in rows:
            parts.append(svg_text(MARGIN, height + BAR_HEIGHT + 3, one.share, 12, FAINT))
            for setup, value in ((ALONE, one.alone), (SPLIT, one.split)):
                left, room = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH - VALUE_WIDTH
                width = max(2.0, value / longest * room)
                parts.append(
                    f'<rect x="{left}" y="{height}" width="{width:.1f}" height="{BAR_HEIGHT}" '
                    f'rx="2" fill="{COLOURS[setup]}"/>'
                )
                text = time_text(value) + (f"   {one.change}" if setup == SPLIT else "")
                parts.append(svg_text(left + width + 8, height + 12, text, 12))
                height += BAR_HEIGHT + BAR_GAP
            height += ROW_GAP
    height += 8
    for text in _notes(comparison):
        for line in textwrap.wrap(text, LINE_CHARS):
            height += LINE_HEIGHT
            parts.append(svg_text(MARGIN, height, line, 11.5, FAINT))
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


def _notes(comparison: Comparison) -> Iterator[str]:
    yield comparison.machine_text()
    yield comparison.cpu.text()
    yield comparison.load_text()
    yield comparison.stability_text()


def svg_text(
    x: float, y: float, text: str, size: float, colour: str = INK, *, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{colour}"{weight} '
        f'xml:space="preserve">{escape(text)}</text>'
    )
