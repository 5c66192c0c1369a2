"""Redraw all files in `images/`."""

from pathlib import Path

from ddp_course.chapters import write_images

for path in write_images(Path(__file__).parents[2] / "images"):
    print(f"images/{path.name}")
