"""Beside the floors: the kit of all notebooks (`chapters/` has what is of one).

show_source, show_diff     the package's own source, and what changed
Prediction                 a number that is written down before it is measured
Drawing, gallery, explore  a schematic; for some settings; with sliders
style, plot_losses, curves figures of measured data
tell                       print a long text in lines that a page has room for

`exercises`, `answers` and `messages` are what a check is made of; `draw/` is what more
than one chapter draws.
"""

from ddp_course.lab.answers import tell
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.plots import curves, plot_losses, style
from ddp_course.lab.palette import RANK_COLORS, rank_color
from ddp_course.lab.place import say_what_is_missing
from ddp_course.lab.predict import Prediction
from ddp_course.lab.source import show_diff, show_source
from ddp_course.lab.widgets import explore, gallery

say_what_is_missing()
