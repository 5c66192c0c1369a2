"""Write all images: `python -m ddp_course.lab.figures`."""

from pathlib import Path

from ddp_course.lab.figures import write_images

for path in write_images(Path(__file__).parents[3] / "images"):
    print(f"images/{path.name}")
