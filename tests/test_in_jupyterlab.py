"""Chapters as JupyterLab shows them, stored: nothing is cut off, all pictures told."""

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
CHAPTERS = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
pytestmark = [
    pytest.mark.kernel,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        CHROMIUM is None or find_spec("playwright") is None, reason="wants a browser"
    ),
]
WIDTHS = (1366, 1000)  # with the file browser open
SERVE = """
import sys
from pathlib import Path
from ddp_course.commands.lab import arguments, initialized
args = arguments(Path(sys.argv[1]), int(sys.argv[2]), "127.0.0.1")
args.append("--LabApp.expose_app_in_browser=True")
initialized(args).start()
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
  if (document.body.textContent.includes('Jupyter news')) wrong.push('a popup');
  const box = document.querySelector('.jp-WindowedPanel-outer');
  box.scrollTop += 0.8 * box.clientHeight;
  return [wrong, box.scrollTop + box.clientHeight >= box.scrollHeight - 2];
}"""
RUN = """async () => {
  const {content, sessionContext} = window.jupyterapp.shell.currentWidget;
  await sessionContext.ready;
  for (const cell of content.widgets) {
    content.activeCellIndex = content.widgets.indexOf(cell);
    await window.jupyterapp.commands.execute('notebook:run-cell');
  }
  return [...content.model.cells].map((cell) => cell.toJSON()).filter((cell) =>
    cell.cell_type == 'code' && !cell.metadata.tags?.includes('raises-exception')
    && (!cell.execution_count || cell.outputs.some((o) => o.output_type == 'error'))
  ).map((cell) => cell.source);
}"""  # cell by cell: "run all" ends where one is meant to fail
MOVE = """async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const picture = () => document.querySelector('.widget-interact .widget-html-content');
  const controls = [...document.querySelectorAll('.widget-interact > *')];
  const next = (menu) => {
    menu.selectedIndex = (menu.selectedIndex + 1) % menu.options.length;
    menu.dispatchEvent(new Event('change', {bubbles: true}));
  };
  const answers = async (change) => {
    const before = picture().innerHTML;
    for (let step = 0; step < 8; step += 1) {
      change(step);
      for (let look = 0; look < 10; look += 1) {
        await wait(50);
        if (picture().innerHTML != before) return true;
      }
    }
    return false;
  };
  const states = {}, menus = controls.flatMap((c) => [...c.querySelectorAll('select')]);
  for (const control of controls) {
    const name = control.querySelector('label')?.textContent;
    const handle = control.querySelector('.noUi-handle');
    const own = control.querySelector('select');
    if (!handle && !own) continue;
    const change = own ? () => next(own) : (step) => handle.dispatchEvent(
      new KeyboardEvent('keydown', {key: step < 4 ? 'ArrowRight' : 'ArrowLeft'}));
    let found = await answers(change);
    for (const menu of menus)  // a control may be of no use with what a menu says
      for (let option = 1; !found && option < menu.options.length; option += 1) {
        next(menu);
        await wait(500);
        found = await answers(change);
      }
    states[name] = found ? 'answers' : 'stands still';
  }
  return states;
}"""
STILL = """
from ddp_course.lab import *
explore(lambda size=1: Drawing(9, 9, title="the same for all"), size=(1, 9))
"""
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
    for source, tags in (("2 / 0", ["raises-exception"]), ("1 / 0", []), (STILL, [])):
        run = {"execution_count": None, "outputs": [], "metadata": {"tags": tags}}
        cells.append({"cell_type": "code", "source": source, **run})
    results = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    planted = {"cells": cells, "metadata": results, "nbformat": 4, "nbformat_minor": 4}
    (root / "notebooks/planted.ipynb").write_text(json.dumps(planted))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, str(root), str(port)]
    server = subprocess.Popen(command, env={**os.environ, "JUPYTER_TOKEN": "t"})
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.2)
    yield f"http://127.0.0.1:{port}/lab/tree/notebooks/{{}}?token=t&reset"
    end(server.pid)
    server.wait()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "args": ["--no-sandbox"]}
        opened = playwright.chromium.launch(**options)
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.set_default_timeout(600_000)
    yield page
    page.close()


def show(page, address: str, width: int = WIDTHS[0]) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(address)
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.wait_for_timeout(2000)


def faults(page) -> set[str]:
    """What is wrong on a page, read from top to bottom."""
    page.evaluate("document.querySelector('.jp-WindowedPanel-outer').scrollTop = 0")
    found, ended = set(), False
    while not ended:
        page.wait_for_timeout(200)
        wrong, ended = page.evaluate(LOOK)
        found |= set(wrong)
    return found


def moved(page) -> dict[str, str]:
    """What comes of it if each control of the first widget is moved."""
    page.evaluate("document.querySelector('.widget-interact').scrollIntoView()")
    page.wait_for_timeout(1000)
    return page.evaluate(MOVE)


def test_chapters_are_shown_whole_and_in_words(lab, page):
    show(page, lab.format("planted.ipynb"), 1000)
    planted = {"too wide: ", "no words for a picture", "no picture: Image"}
    assert faults(page) == planted
    wrong = {}
    for path in CHAPTERS:
        for width in WIDTHS:
            show(page, lab.format(path.name), width)
            wrong[path.name, width] = faults(page)
    assert {place: result for place, result in wrong.items() if result} == {}


def test_a_cell_that_fails_and_a_widget_that_stands_still_are_caught(lab, page):
    show(page, lab.format("planted.ipynb"))
    assert page.evaluate(RUN) == ["1 / 0"]
    assert moved(page) == {"size": "stands still"}


@pytest.mark.endurance
@pytest.mark.skipif("DDP_COURSE_ENDURANCE" not in os.environ, reason="minutes")
@pytest.mark.parametrize("chapter", [path.name for path in CHAPTERS])
def test_a_chapter_is_run_and_its_widget_answers(lab, page, chapter):
    show(page, lab.format(chapter))
    assert page.evaluate(RUN) == []
    if "explore(" in (NOTEBOOKS / chapter).read_text():
        assert set(moved(page).values()) == {"answers"}
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1000)
        assert faults(page) == set()
