"""What a figure says, and where: texts, blocks, colours; that nothing overlaps."""

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from PIL import ImageFont

matplotlib.use("agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # the widest sans-serif

# Schematics: SVG


def elements(node, x=0.0, y=0.0):
    """All elements of a drawing with the shift that applies to them."""
    for child in node:
        shift = re.fullmatch(r"translate\((\S+) (\S+)\)", child.get("transform", ""))
        if shift:
            yield from elements(child, x + float(shift[1]), y + float(shift[2]))
        else:
            yield child, x, y


def boxes(drawing):
    """Texts and rectangles as boxes (left, top, right, bottom), in drawing order."""
    texts, rects, opaque = [], [], []
    root = ElementTree.fromstring(drawing.svg())
    for e, x, y in elements(root):
        kind = e.tag.partition("}")[2]
        if kind == "text":
            size = float(e.get("font-size"))
            bold = "-Bold" if e.get("font-weight") else ""
            font = ImageFont.truetype(FONTS / f"DejaVuSans{bold}.ttf", 100)
            wide = font.getlength(e.text) * size / 100
            left = x + float(e.get("x"))
            left -= wide * {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor")]
            base = y + float(e.get("y"))
            texts.append((e.text, size, (left, base - 0.75 * size, left + wide, base)))
        elif kind == "rect":
            x, y = x + float(e.get("x")), y + float(e.get("y"))
            right, bottom = x + float(e.get("width")), y + float(e.get("height"))
            rects.append((x, y, right, bottom))
            opaque.append(e.get("fill") != "none")
    return texts, rects, opaque


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a, b):
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


def problems(drawing):
    texts, rects, opaque = boxes(drawing)
    for text, size, box in texts:
        if text.strip() and size < 11:
            yield f"{text!r} is {size} px small"
        if not inside(box, (0, -1, drawing.width, drawing.height)):
            yield f"{text!r} leaves the picture"
        # What was drawn before the block on which the text stands is hidden by it.
        on = [i for i, rect in enumerate(rects) if opaque[i] and inside(box, rect)]
        for rect in rects[max(on, default=0) :]:
            if text.strip() and overlap(box, rect) and not inside(box, rect):
                yield f"{text!r} crosses the edge of a rectangle"
    for (a, _, box_a), (b, _, box_b) in itertools.combinations(texts, 2):
        if overlap(box_a, box_b):
            yield f"{a!r} overlaps {b!r}"
    for rect in rects:
        if not inside(rect, (0, 0, drawing.width, drawing.height)):
            yield f"a rectangle leaves the picture: {rect}"


def words(drawing):
    root = ElementTree.fromstring(drawing.svg())
    return [e.text for e, _, _ in elements(root) if e.tag.endswith("text")]


def fills(drawing, name):
    """The fill of the block on which `name` is written, for every such block."""
    root = ElementTree.fromstring(drawing.svg())
    found, rect = [], None
    for e, _, _ in elements(root):
        if e.tag.endswith("rect"):
            rect = e
        elif e.tag.endswith("text") and e.text == name:
            found.append(rect.get("fill"))
    return found


def check_layout(draw):
    """A figure is small enough, described, the same again, and nothing overlaps."""
    drawing = draw()
    assert list(problems(drawing)) == []
    assert drawing.svg() == draw().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


# Plots: matplotlib


def texts(figure):
    """All texts of a figure with their boxes in pixels, after it was laid out."""
    FigureCanvasAgg(figure).draw()
    found = [
        t
        for t in figure.findobj(matplotlib.text.Text)
        if t.get_visible() and t.get_text().strip()
    ]
    shown = []
    for text in found:
        box = matplotlib.text.Text.get_window_extent(text)  # without an arrow
        if box.width and figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1:
            shown.append((text.get_text(), box))
    return shown


def no_texts_overlap(draw):
    """Draw, look at every two texts, return the figure; nothing global has changed."""
    before = dict(matplotlib.rcParams)
    figure = draw()
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == before
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        shown = texts(figure)
    assert len(shown) > 4
    for (a, box_a), (b, box_b) in itertools.combinations(shown, 2):
        wide = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        high = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert min(wide, high) < 2, f"{a!r} overlaps {b!r}"
    return figure
