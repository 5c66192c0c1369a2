"""What a figure says, and where: texts, blocks, colours; that nothing overlaps."""

import itertools
import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import ImageFont

matplotlib.use("agg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402

from ddp_course.lab import explore, gallery  # noqa: E402
from ddp_course.measure import KINDS  # noqa: E402

MIB = 2**20

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"  # the widest sans-serif

# Schematics: SVG


def elements(drawing):
    """All elements of a drawing: what they are, the element, where it begins."""
    return _elements(ElementTree.fromstring(drawing.svg()), 0.0, 0.0)


def _elements(node, x, y):
    for child in node:
        shift = re.fullmatch(r"translate\((\S+) (\S+)\)", child.get("transform", ""))
        if shift:
            yield from _elements(child, x + float(shift[1]), y + float(shift[2]))
        else:
            at = x + float(child.get("x", 0)), y + float(child.get("y", 0))
            yield child.tag.partition("}")[2], child, *at


def rects(drawing):
    """All rectangles in drawing order: x, y, width, height, and the element."""
    for kind, e, x, y in elements(drawing):
        if kind == "rect":
            yield x, y, float(e.get("width")), float(e.get("height")), e


def boxes(drawing):
    """Texts and rectangles as boxes (left, top, right, bottom), in drawing order."""
    texts = []
    for kind, e, left, base in elements(drawing):
        if kind == "text":
            size = float(e.get("font-size"))
            bold = "-Bold" if e.get("font-weight") else ""
            font = ImageFont.truetype(FONTS / f"DejaVuSans{bold}.ttf", 100)
            wide = font.getlength(e.text) * size / 100
            left -= wide * {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor")]
            texts.append((e.text, size, (left, base - 0.75 * size, left + wide, base)))
    found = list(rects(drawing))
    opaque = [e.get("fill") != "none" for *_, e in found]
    return texts, [(x, y, x + w, y + h) for x, y, w, h, _ in found], opaque


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
    return [e.text for kind, e, *_ in elements(drawing) if kind == "text"]


def fills(drawing, name):
    """The fill of the block on which `name` is written, for every such block."""
    found, rect = [], None
    for kind, e, *_ in elements(drawing):
        if kind == "rect":
            rect = e
        elif kind == "text" and e.text == name:
            found.append(rect.get("fill"))
    return found


def check_layout(draw):
    """A figure is small enough, described, the same again, and nothing overlaps."""
    drawing = draw()
    assert list(problems(drawing)) == []
    assert drawing.svg() == draw().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


def laid_out(*figures):
    """Return a test of the layout of figures: a function, or one and all its settings.

    A setting is an argument, or a tuple of several.
    """
    cases = []
    for figure in figures:
        draw, settings = figure if isinstance(figure, tuple) else (figure, [()])
        for one in settings:
            cases.append(partial(draw, *(one if isinstance(one, tuple) else (one,))))

    def name(call):
        return f"{call.func.__name__} {call.args} {call.keywords}"[:80]

    @pytest.mark.parametrize("draw", cases, ids=name)
    def test(draw):
        check_layout(draw)

    return test


def check_sliders(draw, settings, **controls):
    """Sliders begin with a picture; a gallery is narrow, and nothing overlaps in it."""
    view = explore(draw, **controls)
    assert view.children[-1].value.startswith("<img ")
    drawing = gallery(draw, settings)
    assert list(problems(drawing)) == []
    assert drawing.width <= 1000
    return view


# Plots: matplotlib


def apart(*calls):
    """Return a test that no texts of any of these plots overlap."""

    @pytest.mark.parametrize("draw", calls)
    def test(draw):
        no_texts_overlap(draw)

    return test


def ledger(parameters=0, gradients=0, states=0, activations=0, buffers=0, other=0):
    """A ledger, given in MiB."""
    sizes = parameters, gradients, states, activations, buffers, other
    return {kind: n * MIB for kind, n in zip(KINDS, sizes, strict=True)}


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
