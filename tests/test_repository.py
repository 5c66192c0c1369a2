"""What a newcomer meets first: README, environments, CI, links, notebooks."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import reading_time
import yaml
from conftest import OUTCOMES, write_down
from links import (
    anchors,
    dead_links,
    markdown,
    test_planted_dead_links_are_found,  # noqa: F401
)

from ddp_course.lab.draw.drawing import ROOM

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
HINTS = "from ddp_course.chapters import hint, show_solution\n"
GLOSSARY = (ROOT / "notebooks/glossary.md").read_text()
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
PAGES += [*ROOT.glob("notebooks/*.md"), *ROOT.glob("docs/decisions/*.md")]


def commands(readme: str) -> list[str]:
    """Return the first line of every fenced block."""
    return re.findall(r"^```\n(.+)", readme, re.MULTILINE)


TEST_COMMAND = commands(README)[1]


def test_readme_is_short_and_begins_with_the_two_commands():
    prose = "".join(README.split("```")[::2])  # code fences are for copying,
    prose = re.sub(r"^\|.*$", "", prose, flags=re.MULTILINE)  # tables for looking up
    assert len(prose.split()) < 400
    assert commands(README)[0] == "python -m pip install -e . && ddp-course lab"
    assert TEST_COMMAND == 'python -m pip install -e ".[test]" && pytest'


def test_all_three_ci_paths_call_the_one_test_command():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    for job in workflow["jobs"].values():
        assert TEST_COMMAND in [step.get("run") for step in job["steps"]]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    entries = [hook["entry"] for repo in hooks["repos"] for hook in repo["hooks"]]
    assert f"bash -c '{TEST_COMMAND}'" in entries
    assert TEST_COMMAND in (ROOT / ".ci/run").read_text().splitlines()


def pins(requirements: list) -> dict[str, str]:
    """Return {"torch": ">=2.12,<2.14"} for the line "torch>=2.12,<2.14"."""
    lines = [line for line in requirements if isinstance(line, str)]
    return dict(re.match(r"([\w-]+)(.*)", line).groups() for line in lines)


def differing(environment: dict, project: dict) -> dict[str, tuple]:
    """Return the packages whose pins are not the same for conda and for pip.

    Of pip's packages for tests, conda's environment names nbval alone.
    """
    conda, pip = pins(environment["dependencies"]), pins(project["dependencies"])
    pip["nbval"] = pins(project["optional-dependencies"]["test"])["nbval"]
    conda["torch"] = conda.pop("pytorch", None)
    conda.pop("pip", None)
    pip["python"] = project["requires-python"]
    names = conda.keys() | pip.keys()
    return {n: (conda.get(n), pip.get(n)) for n in names if conda.get(n) != pip.get(n)}


def test_environment_has_the_pins_of_pyproject():
    assert differing(ENVIRONMENT, PROJECT) == {}
    assert ENVIRONMENT["name"] == PROJECT["name"] == "ddp-course"
    assert ENVIRONMENT["channels"] == ["conda-forge"]
    assert {"pip": ["-e ."]} in ENVIRONMENT["dependencies"]


def test_a_pin_that_differs_is_seen():
    other = {**PROJECT, "dependencies": ["torch>=2.8"] + PROJECT["dependencies"][1:]}
    assert set(differing(ENVIRONMENT, other)) == {"torch"}
    less = [line for line in ENVIRONMENT["dependencies"] if "nbval" not in line]
    assert set(differing({"dependencies": less}, PROJECT)) == {"nbval"}


def test_python_and_torch_are_the_supported_ones():
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert pins(PROJECT["dependencies"])["torch"] == ">=2.12,<2.14"


def texts() -> dict[str, str]:
    """Return all Markdown of the repository, by file."""
    return {str(p.relative_to(ROOT)): markdown(p) for p in [*PAGES, *NOTEBOOKS]}


def test_every_link_in_a_clone_leads_somewhere():
    assert dead_links(ROOT, [*PAGES, *NOTEBOOKS]) == []


def test_the_readme_has_the_address_of_pyproject():
    """The site reads it there; README.md is read where nothing can be filled in."""
    address = PROJECT["urls"]["Repository"]
    assert f"`git clone {address}`" in README
    placeholder = "example.org" in address
    assert ("(a placeholder:" in README) == placeholder, "README calls it a placeholder"


def test_every_image_in_markdown_has_alt_text():
    for page, text in texts().items():
        for alt in re.findall(r"!\[([^\]]*)\]\(", text):
            assert len(alt.split()) >= 5, (page, alt)


def test_readme_lists_every_chapter_and_no_other():
    listed = re.findall(r"\(notebooks/(\d\d_\w+\.ipynb)\)", README)
    assert listed == [path.name for path in NOTEBOOKS]


def test_readme_maps_every_room_of_the_package():
    rooms = {
        path.name
        for path in (ROOT / "ddp_course").iterdir()
        if not path.name.startswith(("_", "."))
    }
    named = set(re.findall(r"`([\w.]+)/?`", README[README.index("## The package") :]))
    assert rooms <= named


NAME = re.compile(r'\]\(glossary\.md "([^"]+)"\)')  # a Chinese name: a link's tooltip


def apart_from_the_glossary(pages: dict[str, str]) -> list[tuple[str, str]]:
    """Return the Chinese names that a chapter or its line of the glossary lacks."""
    line = re.compile(r"^\| .+? \| (.+?) \| .*\((\d\d_\w+\.ipynb)[^)]*\) \|$", re.M)
    listed = dict(line.findall(pages["notebooks/glossary.md"]))
    wrong = []
    for name, page in listed.items():
        if name not in NAME.findall(pages[f"notebooks/{page}"]):
            wrong.append((page, name))
    for page, text in pages.items():
        wrong += [(page, name) for name in NAME.findall(text) if name not in listed]
        if not page.endswith("glossary.md"):  # elsewhere they are boxes to many readers
            outside = re.findall("[\u4e00-\u9fff]+", NAME.sub("", text))
            wrong += [(page, name) for name in outside]
    return wrong


def test_chapters_and_glossary_have_the_same_chinese_names():
    pages, chapter = texts(), "notebooks/11_pipeline_schedules.ipynb"
    assert apart_from_the_glossary(pages) == []
    link = '[x](glossary.md "无")'
    for planted in ("", pages[chapter] + link, pages[chapter] + "1F1B (一前向)"):
        assert apart_from_the_glossary(pages | {chapter: planted}), planted


def test_the_glossary_is_in_alphabetical_order():
    rows = re.findall(r"^\| ([^|]+) \|.*\.ipynb[^)]*\) \|$", GLOSSARY, re.M)
    plain = [re.sub(r"[`*_ -]", "", row).casefold() for row in rows]
    assert plain == sorted(plain) and len(plain) > 150


ROW = re.compile(r"\| (.+?) \| (.+?) \| .+ \| (\[[^]]+\]\((\d\d_\w+\.ipynb)[^)]*\)) \|")


def section_link(term: str, chinese: str, page: str, text: str) -> str | None:
    """Return the link to the section that introduces a term, as its row has it.

    A section introduces a term if one of its links has the Chinese name as its tooltip,
    and at least the beginning of one of the term's words as its text.
    """
    here = ""
    for line in text.splitlines():
        if heading := re.match("(#{1,3}) (.*)", line):
            here = heading[2] if len(heading[1]) > 1 else ""
        link = re.search(rf'\[([^]]+)\]\(glossary\.md "{re.escape(chinese)}"\)', line)
        if link:
            words = [w[:4] for w in re.findall(r"\w{3,}|\w\b", term.casefold())]
            if not any(word in link[1].casefold() for word in words):
                return None
            (anchor,) = anchors(f"# {here}") if here else [""]
            return (
                f"[{page[:2]} · {here}]({page}#{anchor})"
                if here
                else f"[{page[:2]}]({page})"
            )
    return None


def misplaced(glossary: str, pages: dict[str, str]) -> list[tuple]:
    """Return (term, link, right link) of rows that do not lead to their section."""
    rows = [line for line in glossary.splitlines() if line.startswith("| ")][1:]
    wrong = [(row, None, None) for row in rows if not ROW.fullmatch(row)]
    for term, chinese, link, page in ROW.findall(glossary):
        right = section_link(term, chinese, page, pages[f"notebooks/{page}"])
        wrong += [(term, link, right)] if link != right else []
    return wrong


def test_every_row_of_the_glossary_leads_to_the_section_that_introduces_its_term():
    pages = texts()
    assert misplaced(GLOSSARY, pages) == []
    row = next(line for line in GLOSSARY.splitlines() if line.startswith("| flush"))
    for old, new in (
        ("[10 · Not the next batch]", "[10 · What is kept]"),
        ("#not-the-next-batch", "#what-is-kept"),
        ("(10_pipeline_parallel.ipynb", "(11_pipeline_schedules.ipynb"),
        ("| flush |", "| bubble |"),  # the link there has another text
        (" |", " ]"),
    ):
        assert old in row
        assert len(misplaced(f"| term |\n{row.replace(old, new)}", pages)) == 1, new


# ---- notebooks ---------------------------------------------------------------------


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def complaints(notebook: dict) -> list[str]:
    """Return what the house rules forbid in a notebook."""
    cells, wrong = notebook["cells"], []
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    words = {
        kind: sum(
            len("".join(cell["source"]).split())
            for cell in cells
            if cell["cell_type"] == kind
        )
        for kind in ("code", "markdown")
    }
    if words["code"] > words["markdown"]:
        wrong.append("more code than prose")
    if "widgets" in notebook["metadata"]:
        wrong.append("stored widget state")
    for before, cell in zip(cells, cells[1:], strict=False):
        if cell["cell_type"] == before["cell_type"] == "code":
            wrong.append("a code cell without a sentence before it")
    for source in sources:
        if len(source.splitlines()) > 20:
            wrong.append(f"over 20 lines: {source[:40]}")
        for bad in ("%%writefile", "%pip", "!pip", "sys.path", "import *", "/root/"):
            if bad in source:
                wrong.append(f"{bad} in {source[:40]}")
        if re.search(r"^show_\w+\([^()]*\)\n(?!\s)", source, re.M):
            wrong.append(f"shown in the middle, so not seen: {source[-40:]}")
        if source.rstrip().endswith(";"):
            wrong.append(f"a semicolon at the end of {source[-40:]}")
    unchecked = [
        cell
        for cell in code
        if "nbval-ignore-output" in cell["metadata"].get("tags", [])
    ]
    if len(unchecked) > 0.35 * len(code):
        wrong.append(f"{len(unchecked)} of {len(code)} cells are not compared")
    return wrong


def lengths(notebook: dict) -> list[str]:
    """Return where a chapter is longer than it may be, or than it says, or too wide."""
    texts = {"code": "", "markdown": ""}
    for cell in notebook["cells"]:
        texts[cell["cell_type"]] += "".join(cell["source"]) + "\n"
    words = reading_time.words(texts["markdown"])
    code = texts["code"].replace(HINTS, "")  # the same line in every chapter
    lines = reading_time.lines(code)
    stated = re.search(r"\*\*Time:\*\* (\d+) minutes to read", texts["markdown"])
    measured, wrong = reading_time.minutes_without(notebook, set()), []
    if words > 4500 or lines > 405:
        wrong.append(f"{words} words and {lines} lines; 4,500 and 405 at most")
    if not stated or abs(int(stated[1]) - measured) > 3:
        wrong.append(f"{stated and stated[0]}; measured {measured:.0f}")
    shorter = re.search(r"to read, or (\d+) without (.*?); ", texts["markdown"])
    if shorter:
        left_out = set(re.findall(r"\*(.*?)\*", shorter[2]))
        missing = [name for name in left_out if f"## {name}\n" not in texts["markdown"]]
        left = reading_time.minutes_without(notebook, left_out)
        if missing or abs(int(shorter[1]) - left) > 2:
            wrong.append(f"{shorter[0]} measured {left:.0f}, missing {missing}")
    if stated and min(int(time[1]) for time in (stated, shorter) if time) > 60:
        wrong.append("neither the chapter nor a shorter way takes an hour or less")
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", output)
            if data.keys() <= {"text/plain", "name", "output_type", "text"}:
                text = "".join(data.get("text", data.get("text/plain", ())))
                widest = max(text.splitlines(), key=len, default="")
                if len(widest) > 100:
                    long = f"a line of {len(widest)} characters, 100 at most"
                    wrong.append(f"{long}: {widest[:40]}")
            for wide in re.findall('<svg[^>]* width="([0-9]+)', str(data)):
                if int(wide) > 1.08 * ROOM:  # letters of 11 pixels would be under 10
                    wrong.append(f"a drawing of {wide} pixels")
    return wrong


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_keep_the_house_rules(path):
    notebook = json.loads(path.read_text())
    assert complaints(notebook) + lengths(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_as_they_are(path):
    assert path.stat().st_size < 500 * 1024
    counts = [cell["execution_count"] for cell in code_cells(path)]
    stored = counts == [*range(1, len(counts) + 1)]
    assert stored, f"not run as it is: ddp-course notebooks --save {path.name[:2]}"
    assert not re.search(r"/(tmp|root|work|home)/", path.read_text())


def test_planted_notebook_mistakes_are_seen():
    def cell(kind, source, tags=()):
        return {"cell_type": kind, "source": source, "metadata": {"tags": list(tags)}}

    bad = [
        cell("markdown", "few words"),
        cell("code", "x = 1;", ["nbval-ignore-output"]),
        cell(
            "code", "import sys; sys.path.append('.')\nshow_source(f)\n" + "pass\n" * 20
        ),
    ]
    results = complaints({"cells": bad, "metadata": {"widgets": {}}})
    assert len(results) == 8, results
    bad[0]["source"] = "**Time:** 30 minutes to read. " + "word " * 4500
    bad[1]["source"] = "pass\n" * 401
    bad[1]["outputs"] = [{"output_type": "stream", "name": "x", "text": "a  b" * 26}]
    bad[2]["outputs"] = [
        {"data": {"text/html": ["<img src='<svg x='' width=\"793\"'>"]}}
    ]
    results = lengths({"cells": bad})
    assert len(results) == 4, results
    short = "**Time:** 10 minutes to read, or 9 without *Words*; no more.\n\n## Words\n"
    bad[0]["source"], bad[1]["source"] = short + "word " * 1800, "pass"
    assert "measured 0, missing []" in lengths({"cells": bad[:2]})[0]
    bad[0]["source"] = short.replace("10", "71").replace("9", "61") + "word " * 1800
    fence = "```python\n" + "pass\n" * 490 + "```"  # source that is shown: 61 minutes
    bad[1]["outputs"] = [{"data": {"text/markdown": fence}}]
    assert "neither" in lengths({"cells": bad[1::-1]})[-1]
    bad[1]["outputs"] = [{"data": {"text/markdown": f"<details>{fence}</details>"}}]
    assert "measured 10" in lengths({"cells": bad[1::-1]})[0]
    bad[1]["outputs"] = []
    bad[0]["source"] = bad[1]["source"] = "short"
    assert "None" in lengths({"cells": bad})[0]  # no time is stated


# ---- names in prose ------------------------------------------------------------------

ELSEWHERE = """
    TORCH_NCCL_DUMP_ON_TIMEOUT
    NCCL srun CUDA_VISIBLE_DEVICES torchfrtrace SLURM_PROCID SLURM_LOCALID
    SLURM_NODEID SLURM_NTASKS A c10d GLOO_SOCKET_IFNAME Join exp_avg exp_avg_sq
    DTensor TorchDispatchMode non_blocking DataLoader record_stream fully_shard
    parallelize_module CPUOffloadPolicy set_requires_gradient_sync
    fused_all_gather_matmul ColwiseParallel RowwiseParallel SequenceParallel
    loss_parallel send_forward_recv_backward continue pipeline_order
    allow_bf16_reduced_precision_reduction bf16_compress_hook pg_options
    is_high_priority_stream optim_grads_params a2a pipeline_parallel_schedule
    OSS _single PipelineModule OneBitAdam ParallelismConfig Fused
    dp_replicate_size dp_shard_size sp_size allgather UlyssesSPAttentionHF RANK
    NODE_RANK workerPoolSpecs CLUSTER_SPEC SKYPILOT_NUM_NODES SKYPILOT_NODE_RANK
    SKYPILOT_NODE_IPS SKYPILOT_NUM_GPUS_PER_NODE Torchrun LOCAL_RANK tp_size cp_size
    MASTER_ADDR MASTER_PORT WORLD_SIZE create_group
"""  # names of PyTorch and of other programs


def names_in_package() -> set[str]:
    """Return the names of files, classes, functions, arguments and attributes."""
    names: set[str] = set()
    for file in ROOT.glob("ddp_course/**/*.py"):
        names |= {file.stem, file.parent.name}
        for node in ast.walk(ast.parse(file.read_text())):
            names |= {getattr(node, key, None) for key in ("name", "arg", "attr")}
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def unknown_names(notebook: dict, known: set[str]) -> list[str]:
    """Return the names in prose that neither the chapter's cells nor `known` have."""
    code = [(c["source"], c["outputs"]) for c in notebook["cells"] if "outputs" in c]
    seen = set(re.findall(r"\w+", json.dumps(code).replace("\\n", " ")))
    prose = [c for c in notebook["cells"] if c["cell_type"] == "markdown"]
    texts = ["".join(cell["source"]) for cell in prose]
    names = {
        name
        for text in texts
        if "## Read next" not in text
        for name in re.findall(r"`([A-Za-z_]\w*)(?:\([^`]*\))?`", text)
    }
    return sorted(names - seen - known)


def test_prose_names_only_what_there_is():
    known = names_in_package() | set(ELSEWHERE.split())
    for path in NOTEBOOKS:
        assert unknown_names(json.loads(path.read_text()), known) == [], path.name
    renamed = {"cell_type": "markdown", "source": ["`Kept` and `no_such(1)`"]}
    assert unknown_names({"cells": [renamed]}, known) == ["Kept", "no_such"]


# ---- what the endurance tests came to ------------------------------------------------


def unproven(file: Path) -> list[str]:
    """Return the long forms that failed when they were last run, or are no more."""
    wrong = []
    for name, record in json.loads(file.read_text()).items():
        where, _, test = name.partition("::")
        path = ROOT / "tests" / where
        known = path.exists() and f"def {test.partition('[')[0]}(" in path.read_text()
        wrong += [name] * (record["outcome"] != "passed" or not known)
    return wrong


def test_all_long_forms_have_passed(tmp_path):
    assert unproven(OUTCOMES) == []
    file = tmp_path / "endurance.json"
    file.write_text(OUTCOMES.read_text())
    lines = {"nodeid": "tests/test_repository.py::test_gone", "duration": 1.26}
    lines |= {"outcome": "passed", "user_properties": [("kills", 30)]}
    write_down(SimpleNamespace(**lines), file)
    name = "test_repository.py::test_code_is_formatted_and_linted"
    write_down(
        SimpleNamespace(**lines | {"nodeid": f"tests/{name}", "outcome": "failed"}),
        file,
    )
    assert unproven(file) == [name, "test_repository.py::test_gone"]
    record = json.loads(file.read_text())
    gone = record["test_repository.py::test_gone"]
    assert gone["seconds"] == 1.3 and gone["kills"] == 30
    assert json.loads(OUTCOMES.read_text()).items() <= record.items()  # those stayed


def test_code_is_formatted_and_linted():
    for command in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "."],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr
