"""Chapters as JupyterLab shows them, stored: nothing is cut off, all pictures told."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import end

from ddp_course.lab import show_diff
from ddp_course.lab.palette import darker, lighter

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
WIDTHS = (1366, 1000)  # with the file browser open
SERVE = """
import sys
from pathlib import Path
from jupyterlab.labapp import LabApp
from ddp_course.commands.lab import arguments
told = arguments(Path(sys.argv[1]), int(sys.argv[2]), "127.0.0.1")
LabApp.initialize_server(told).start()
"""
LOOK = """() => {
  const wrong = [], shown = '.jp-OutputArea-output, .jp-MarkdownOutput';
  for (const box of document.querySelectorAll(shown)) {
    const name = box.textContent.slice(0, 40);
    const right = box.getBoundingClientRect().right;
    if (box.scrollWidth > box.clientWidth + 1) wrong.push('too wide: ' + name);
    for (const image of box.querySelectorAll('img')) {
      if (!image.alt || image.alt == 'Image')  // which JupyterLab writes itself
        wrong.push('no words for a picture');
      if (image.complete && !image.naturalWidth) wrong.push('no picture: ' + image.alt);
      if (image.getBoundingClientRect().right > right + 1)
        wrong.push('cut off: ' + image.alt.slice(0, 40));
    }
  }
  const box = document.querySelector('.jp-WindowedPanel-outer');
  box.scrollTop += 0.8 * box.clientHeight;
  return [wrong, box.scrollTop + box.clientHeight >= box.scrollHeight - 2];
}"""
PLANTED = '<div style="width:2000px"><img src="data:,"></div>'


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab with all chapters, and one with mistakes."""
    root = tmp_path_factory.mktemp("course")
    shutil.copytree(NOTEBOOKS, root / "notebooks")
    shutil.copytree(NOTEBOOKS.parent / "images", root / "images")
    right = {"text/markdown": show_diff(darker, lighter).data, "text/plain": ""}
    cells = [
        {"cell_type": "code", "source": "1", "metadata": {}, "execution_count": 1,
         "outputs": [{"output_type": "execute_result", "metadata": {}, "data": data,
                      "execution_count": 1}]}
        for data in (right, {"text/html": PLANTED, "text/plain": ""})
    ]  # fmt: skip
    planted = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4}
    (root / "notebooks/planted.ipynb").write_text(json.dumps(planted))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(root), str(port)]
    server = subprocess.Popen(command, env={**os.environ, "JUPYTER_TOKEN": "t"})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}/lab/tree/notebooks/{{}}?token=t&reset"
    end(server.pid)
    server.wait()


def faults(browser, address: str, width: int) -> set[str]:
    """What is wrong on a page, read from top to bottom in a window of `width`."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_timeout(2000)
    found, ended = set(), False
    while not ended:
        wrong, ended = page.evaluate(LOOK)
        found |= set(wrong)
        page.wait_for_timeout(200)
    page.close()
    return found


@pytest.mark.kernel
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None, reason="wants a browser"
)
def test_chapters_are_shown_whole_and_in_words(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        told = faults(browser, lab.format("planted.ipynb"), 1000)
        assert told == {"too wide: ", "no words for a picture", "no picture: Image"}
        wrong = {
            (path.name, width): faults(browser, lab.format(path.name), width)
            for path in sorted(NOTEBOOKS.glob("*.ipynb"))
            for width in WIDTHS
        }
        browser.close()
    assert {place: told for place, told in wrong.items() if told} == {}
