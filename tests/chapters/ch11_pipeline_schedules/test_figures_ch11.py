"""The figures of chapter 11 show what they are about, and nothing else."""

import re

from drawings import laid_out, words

from ddp_course.chapters.ch11_pipeline_schedules.figures import two_orders

test_the_layout = laid_out(two_orders)


def test_the_opening_of_chapter_11_does_not_tell_what_is_to_be_predicted():
    drawing = two_orders()
    text = " ".join([*words(drawing), drawing.description])
    assert not re.search(r"%|keeps|bubble \d|1F1B|27\.3", text)
    assert "GPipe" in words(drawing) and "Zero bubble (ZB-H1)" in words(drawing)
