"""Draw the diagrams of the documentation as SVG, in one style, for light and dark pages.

A `Drawing` is a panel with boxes, arrows and texts at given places. A `Sequence` is a drawing with
one column for each participant, whose messages come one below the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

WIDTH = 760
LINE = 17
STYLE = """\
svg { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
.panel { fill: #ffffff; stroke: #d0d7de; }
text { fill: #1f2328; }
.muted { fill: #59636e; font-size: 12px; }
.title { font-weight: 600; }
.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
.box { stroke-width: 1.4; fill: #f6f8fa; stroke: #818b98; }
.router { fill: #fbefff; stroke: #8250df; }
.prefill { fill: #ddf4ff; stroke: #0969da; }
.decode { fill: #dafbe1; stroke: #1a7f37; }
.note { fill: #fff8c5; stroke: #d4a72c; }
.failed { fill: #ffebe9; stroke: #cf222e; }
.group { fill: none; stroke: #818b98; stroke-dasharray: 5 4; }
.line { fill: none; stroke: #59636e; stroke-width: 1.5; }
.life { stroke: #afb8c1; stroke-dasharray: 3 4; }
.reply { stroke-dasharray: 6 4; }
.kv { stroke: #bc4c00; stroke-width: 4; }
.stop { stroke: #cf222e; stroke-width: 2; }
.head { fill: #59636e; }
.head-kv { fill: #bc4c00; }
.behind { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  .panel, .behind { fill: #161b22; }
  .panel { stroke: #3d444d; }
  text { fill: #f0f6fc; }
  .muted { fill: #9ba4ae; }
  .box { fill: #212830; stroke: #757f8a; }
  .router { fill: #2b2140; stroke: #ab7df8; }
  .prefill { fill: #12294a; stroke: #4493f8; }
  .decode { fill: #12321e; stroke: #3fb950; }
  .note { fill: #332a10; stroke: #bb8009; }
  .failed { fill: #3d1a1d; stroke: #f85149; }
  .group { fill: none; stroke: #757f8a; }
  .line { stroke: #9ba4ae; }
  .life { stroke: #4d555e; }
  .kv { stroke: #db6d28; }
  .stop { stroke: #f85149; }
  .head { fill: #9ba4ae; }
  .head-kv { fill: #db6d28; }
}"""
HEADS = "".join(
    f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="{size}" '
    f'markerHeight="{size}" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
    f'<path class="{name}" d="M0 0L10 5L0 10z"/></marker>'
    for name, size in (("head", 10), ("head-kv", 15))
)


@dataclass
class Drawing:
    """An SVG image. `title` names it, `description` is what a screen reader gets besides."""

    title: str
    description: str
    height: int = 0
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """Draw a box with centred lines, the first one as its title."""
        self.frame(x, y, width, height, kind)
        first = y + height / 2 - (len(lines) - 1) * LINE / 2 + 4.5
        for index, line in enumerate(lines):
            style = "title" if index == 0 else "muted"
            self.text(x + width / 2, first + index * LINE, line, style, "middle")

    def frame(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="6"/>'
        )

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">'
            f"{escape(text, quote=False)}</text>"
        )

    def line(self, points: list[tuple[float, float]], style: str = "", both: bool = False) -> None:
        """Draw an arrow along `points`; `style` may name a line without a head."""
        head = "" if style in ("life", "stop", "plain") else self._heads(style, both)
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="line {style}" d="{path}"{head}/>')

    def label(self, x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> None:
        """Write a text over a line, on the panel's colour."""
        width = (6.2 if style == "muted" else 6.8) * len(text)
        left = x - width / 2 if anchor == "middle" else x
        self.parts.append(
            f'<rect class="behind" x="{left - 3:g}" y="{y - 12:g}" '
            f'width="{width + 6:g}" height="16"/>'
        )
        self.text(x, y, text, style, anchor)

    def cross(self, x: float, y: float) -> None:
        for sign in (-1, 1):
            self.line([(x - 8, y - 8 * sign), (x + 8, y + 8 * sign)], "stop")

    def svg(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" height="{self.height}"'
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
            'aria-labelledby="title desc">',
            f'<title id="title">{escape(self.title, quote=False)}</title>',
            f'<desc id="desc">{escape(self.description, quote=False)}</desc>',
            f"<style>\n{STYLE}\n</style>",
            f"<defs>{HEADS}</defs>",
            f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" '
            f'height="{self.height - 1}" rx="8"/>',
        ]
        return "\n".join([*head, *self.parts, "</svg>\n"])

    @staticmethod
    def _heads(style: str, both: bool) -> str:
        name = "head-kv" if "kv" in style else "head"
        start = f' marker-start="url(#{name})"' if both else ""
        return f'{start} marker-end="url(#{name})"'


class Sequence(Drawing):
    """A sequence diagram. Participants are (name, kind); messages name their keywords."""

    def __init__(self, title: str, description: str, **participants: tuple[str, str]) -> None:
        super().__init__(title, description)
        step = WIDTH / len(participants)
        self._columns = {key: step * (index + 0.5) for index, key in enumerate(participants)}
        self._width = min(step - 24, 150)
        for key, (name, kind) in participants.items():
            self.box(self._columns[key] - self._width / 2, 16, self._width, 32, kind, name)
        self._y = 48
        self._ends: dict[str, float] = {}

    def message(self, sender: str, receiver: str, *lines: str, style: str = "") -> None:
        """Draw an arrow with its lines above."""
        self._y += 14 + LINE * len(lines)
        left, right = sorted((self._columns[sender], self._columns[receiver]))
        for index, line in enumerate(lines):
            style_of_line = "" if index == 0 else "muted"
            y = self._y - LINE * (len(lines) - 1 - index) - 9
            self.label((left + right) / 2, y, line, style_of_line)
        gap = 4 if self._columns[sender] < self._columns[receiver] else -4
        begin, end = self._columns[sender], self._columns[receiver]
        self.line([(begin + gap, self._y), (end - gap, self._y)], style)

    def note(self, where: str, *lines: str, width: float = 0, kind: str = "note") -> None:
        """Write what a participant does, on its column."""
        height = LINE * len(lines) + 10
        self._y += 12
        width = width or self._width + 8
        x = min(max(self._columns[where] - width / 2, 8), WIDTH - width - 8)
        self.frame(x, self._y, width, height, kind)
        for index, line in enumerate(lines):
            y = self._y + 17 + index * LINE
            self.text(x + width / 2, y, line, "", "middle")
        self._y += height

    def end(self, who: str, why: str) -> None:
        """End the participant's line with a cross."""
        self._y += 16
        self.cross(self._columns[who], self._y)
        self.text(self._columns[who] + 16, self._y + 5, why)
        self._ends[who] = self._y

    def finished(self) -> Sequence:
        """Draw the participants' lines, below all else, and return the drawing."""
        self._y += 20
        lines = Drawing("", "")
        for key, x in self._columns.items():
            lines.line([(x, 48), (x, self._ends.get(key, self._y))], "life")
        self.parts[:0] = lines.parts
        self.height = round(self._y + 10)
        return self
