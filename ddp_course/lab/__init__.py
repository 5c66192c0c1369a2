"""Beside the floors: the kit that all notebooks share.

show_source, show_diff     the package's own source, and what changed
Prediction                 a number that is written down before it is measured
Drawing, gallery, explore  a schematic; several of them side by side; one with sliders
style, plot_losses, curves figures of measured data
tell                       print a long text in lines that fit on a page

Read the modules in this order:

    source      show the package's own source
    predict, beliefs
                write a number down before it is measured; common wrong guesses
    exercises   run the learner's function; answer with a hint
    answers, messages
                call the learner's function safely; watch what it sends
    judge, values, hard
                compare an answer with its solution, and two values; hard models
    orders      judge a pipeline's order that the learner wrote
    imagined_gpus
                run scripts for GPUs on the CPU; note who puts what on which GPU
    progress    store which exercises pass, in the learner's copy
    place       explain what a notebook lacks outside its folder
    palette, draw
                one colour for each rank; the figures of several chapters
    widgets     interactive views, each after a static figure
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
