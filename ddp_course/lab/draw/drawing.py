"""A small SVG writer for the course's schematic figures.

The same calls write the same bytes on every machine, so notebooks and `images/` can be
compared byte by byte. No element has an id, so one page can hold several drawings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape, quoteattr

from ddp_course.lab.palette import INK, darker, text_color

LINE = 1.35  # distance of two lines of text, in font sizes
ROOM = 720  # pixels; a narrow window shrinks wider drawings until text is illegible
PLAIN = ' \n"(),:;<=>/'  # characters that a data URL of an SVG need not escape
Point = tuple[float, float]
Box = tuple[float, float, float, float]  # x and y of the top left corner, width, height


class Drawing:
    """A picture of `width` x `height` pixels on white, (0, 0) at the top left.

    `title` says in a few words what the picture shows, and `description` says it in
    full: both are for readers who cannot see it. A notebook displays a drawing that is
    a cell's last value. The keywords `look` of rectangles, lines and curves are the
    arguments of `_look`.
    """

    def __init__(
        self, width: float, height: float, *, title: str, description: str = ""
    ) -> None:
        if not (0 < width < math.inf and 0 < height < math.inf):
            raise ValueError(
                f"a drawing has {width} x {height} pixels; both must be above 0"
            )
        if not title:
            raise ValueError("a drawing needs a title, for readers who cannot see it")
        self.width, self.height = width, height
        self.title, self.description = title, description
        self._parts: list[str] = []
        self.rect(0, 0, width, height, fill="#FFFFFF", stroke="none")

    def rect(
        self, x: float, y: float, width: float, height: float, **look: Any
    ) -> None:
        """Draw a rectangle with its top left corner at (x, y)."""
        self._add("rect", x=x, y=y, width=width, height=height, **_look(**look))

    def hatch(
        self, x: float, y: float, width: float, height: float, *, stroke: str = INK
    ) -> None:
        """Fill a rectangle with slanted lines: the sign of communication."""
        lines, step = [], 6
        for k in range(math.floor(-height / step) + 1, math.ceil(width / step)):
            c = k * step  # the line through (x + c, y), going down to the right
            left, top = max(c, 0), max(-c, 0)
            right, bottom = min(width, c + height), min(height, width - c)
            lines.append(
                f"M{number(x + left)} {number(y + top)}"
                f"L{number(x + right)} {number(y + bottom)}"
            )
        self._add("path", d="".join(lines), **_look(stroke=stroke))

    def line(self, *points: Point, **look: Any) -> None:
        """Draw straight lines from point to point."""
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add("polyline", points=path, **_look(**look))

    def curve(self, start: Point, control: Point, end: Point, **look: Any) -> None:
        """Draw a curve that leaves `start` towards `control` and bends to `end`."""
        (a, b), (c, d), (e, f) = ([number(v) for v in p] for p in (start, control, end))
        self._add("path", d=f"M{a} {b}Q{c} {d} {e} {f}", **_look(**look))

    def arrow(
        self, start: Point, end: Point, *, stroke_width: float = 1.5, both: bool = False
    ) -> None:
        """Draw an arrow whose tip is at `end`; with `both`, one at `start` as well."""
        head = 4 + 2.5 * stroke_width
        long = math.dist(start, end)
        if long < head * (2 if both else 1):
            raise ValueError(
                f"an arrow from {start} to {end} is shorter than its head; it must be "
                f"{head:g} pixels or longer for each head"
            )
        ux, uy = (end[0] - start[0]) / long, (end[1] - start[1]) / long
        tips = [(end, 1), (start, -1)] if both else [(end, 1)]
        inner = {1: end, -1: start}
        for (x, y), way in tips:
            bx, by = x - way * ux * head, y - way * uy * head
            inner[way] = (bx, by)
            wide = head * 0.45
            beside = [(bx - k * uy * wide, by + k * ux * wide) for k in (1, -1)]
            path = " ".join(f"{number(p)},{number(q)}" for p, q in [(x, y), *beside])
            self._add("polygon", points=path, fill=INK)
        self.line(inner[-1], inner[1], stroke_width=stroke_width)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        anchor: str = "middle",
        bold: bool = False,
        fill: str = INK,
    ) -> None:
        """Write one line whose baseline is at `y`; `anchor`: start, middle or end."""
        look = {"font_size": size, "text_anchor": anchor}
        look |= {"font_weight": "bold" if bold else None, "fill": fill}
        self._add("text", escape(text), x=x, y=y, **look)

    def block(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        fill: str,
        size: float = 13,
        small: float = 11,
        radius: float = 4,
    ) -> None:
        """Draw a filled block with a dark edge; first line bold, the others small."""
        edge, ink = darker(fill), text_color(fill)
        self.rect(x, y, width, height, fill=fill, stroke=edge, radius=radius)
        sizes = [size] + [small] * (len(lines) - 1)
        # Centre the capital letters, which are 0.72 font sizes high.
        high = 0.72 * size + LINE * sum(sizes[1:])
        baseline = y + (height - high) / 2 + 0.72 * size
        for i, (line, points) in enumerate(zip(lines, sizes, strict=True)):
            self.text(x + width / 2, baseline, line, size=points, bold=i == 0, fill=ink)
            baseline += LINE * small

    @contextmanager
    def shifted(self, x: float, y: float) -> Iterator[None]:
        """Move the origin by (x, y) for everything drawn inside the `with`."""
        self._parts.append(f'<g transform="translate({number(x)} {number(y)})">')
        yield
        self._parts.append("</g>")

    def place(self, other: Drawing, x: float, y: float) -> None:
        """Draw `other` into this drawing, its top left corner at (x, y)."""
        with self.shifted(x, y):
            self._parts += other._parts

    def svg(self) -> str:
        """Return the drawing as an SVG document."""
        width, height = number(self.width), number(self.height)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
                f'height="{height}" viewBox="0 0 {width} {height}" role="img" '
                f'font-family="sans-serif">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self.description or self.title)}</desc>",
                *self._parts,
                "</svg>\n",
            ]
        )

    def save(self, path: str | Path) -> None:
        """Write the drawing to the file `path`."""
        Path(path).write_bytes(self.svg().encode())

    def _repr_html_(self) -> str:
        words = ". ".join(filter(None, [self.title, self.description]))
        return picture(f"image/svg+xml,{quote(self.svg(), safe=PLAIN)}", words)

    def __repr__(self) -> str:
        return f"<Drawing: {self.title}>"

    def _add(self, tag: str, body: str = "", **attributes: float | str | None) -> None:
        words = [tag]
        for name, value in attributes.items():
            if value is not None:
                text = value if isinstance(value, str) else number(value)
                words.append(f"{name.replace('_', '-')}={quoteattr(text)}")
        end = f">{body}</{tag}>" if body else "/>"
        self._parts.append(f"<{' '.join(words)}{end}")


def picture(data: str, words: str) -> str:
    """Return HTML that shows a picture, with `words` as its alternative text.

    `data` follows "data:" in the image's URL. The picture is at most as wide as the
    page. (JupyterLab adds no alternative text to pictures that it displays itself.)
    """
    return (
        f'<img alt={quoteattr(words)} style="max-width:100%;height:auto" '
        f"src='data:{data}'>"
    )


def number(value: float) -> str:
    """Format `value` with at most two decimals, the same on every machine."""
    if not math.isfinite(value):
        raise ValueError(f"a coordinate is {value}; it must be finite")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _look(
    fill: str = "none",
    stroke: str = INK,
    stroke_width: float = 1,
    radius: float = 0,
    dashed: bool | str = False,
) -> dict[str, float | str | None]:
    """Return SVG attributes; `dashed` may be lengths of dash and gap, as in "3 3"."""
    return {
        "rx": radius or None,
        "fill": fill,
        "stroke": stroke,
        "stroke_width": None if stroke_width == 1 else stroke_width,
        "stroke_dasharray": "5 4" if dashed is True else dashed or None,
    }
