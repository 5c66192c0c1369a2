"""Interactive views, and the static figure before each of them.

Both use the same plain function, which takes numbers and returns a drawing. So nothing
can be learned only by moving a slider.
"""

from __future__ import annotations

import html
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.drawing import ROOM, Drawing

if TYPE_CHECKING:
    from ipywidgets import interactive

CAPTION, GAP = 30, 24


def explore(draw: Callable[..., Drawing], **controls: Any) -> interactive:
    """Return sliders for the arguments of `draw`, above its drawing.

    `controls` are as for `ipywidgets.interact`: (low, high) makes a slider, a list
    makes a menu. A slider starts at the argument's default, if it has one. Arguments
    without a control keep their defaults.
    """
    from ipywidgets import HTML, interactive

    class Picture(HTML):
        """HTML that does not write all its content into the notebook's file."""

        def __repr__(self) -> str:
            return "Picture()"

    picture = Picture()

    def redraw(**values: Any) -> None:
        try:
            picture.value = draw(**values)._repr_html_()
        except Exception as error:  # e.g. values that cannot be combined
            picture.value = f"<p>{type(error).__name__}: {html.escape(str(error))}</p>"

    redraw.__signature__ = _signature(draw, controls)
    # An Output widget and its clear_output would not work under nbval.
    view = interactive(redraw, clear_output=False, **controls)
    for control in view.children[:-1]:
        control.style.description_width = "initial"  # names are not cut off
    view.children = (*view.children[:-1], picture)
    return view


def gallery(
    draw: Callable[..., Drawing], settings: Sequence[Mapping[str, Any]]
) -> Drawing:
    """Return one drawing with `draw(**setting)` for every setting, side by side."""
    if not settings:
        raise ValueError("a gallery needs at least one setting to draw")
    drawings = [draw(**setting) for setting in settings]
    captions = [", ".join(f"{k} = {v}" for k, v in s.items()) for s in settings]
    pairs = list(zip(captions, drawings, strict=True))
    places = _side_by_side(drawings)
    whole = Drawing(
        max(x + d.width for (x, _), d in zip(places, drawings, strict=True)),
        max(y + d.height for (_, y), d in zip(places, drawings, strict=True)),
        title=f"{draw.__name__} for {len(settings)} settings",
        description=" ".join(f"{c}: {d.title}. {d.description}" for c, d in pairs),
    )
    for (caption, drawing), (x, y) in zip(pairs, places, strict=True):
        whole.text(x + drawing.width / 2, y - 10, caption)
        whole.place(drawing, x, y)
    return whole


def _side_by_side(drawings: Sequence[Drawing]) -> list[tuple[float, float]]:
    """Return the place (x, y) of each drawing, in rows of limited width."""
    places: list[tuple[float, float]] = []
    x, y, tallest = 0.0, float(CAPTION), 0.0
    for drawing in drawings:
        if x and x + drawing.width > ROOM:
            x, y, tallest = 0.0, y + tallest + CAPTION, 0.0
        places.append((x, y))
        x, tallest = x + drawing.width + GAP, max(tallest, drawing.height)
    return places


def _signature(draw: Callable, names: Mapping[str, Any]) -> inspect.Signature:
    """Return a signature with only the arguments that have a control."""
    known = inspect.signature(draw).parameters
    if unknown := [name for name in names if name not in known]:
        raise TypeError(
            f"{draw.__name__} has no argument {unknown[0]!r}; it has {', '.join(known)}"
        )
    for name, control in names.items():
        if isinstance(control, (int, float)) and not isinstance(control, bool):
            raise TypeError(
                f"{name} is {control!r}; it must be (lowest, highest) for a slider, "
                "a list for a menu, or True or False for a checkbox"
            )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature([known[name].replace(kind=kind) for name in names])
