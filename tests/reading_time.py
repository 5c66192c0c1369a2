"""Count how long a chapter takes to read: prose, cells and the source it shows."""

import re

WORDS, LINES, SHOWN = 180, 12, 8  # a minute: prose, lines of cells, lines of source
LEFT_OUT = {"Exercises", "Read next"}  # their time is stated apart


def words(markdown: str) -> int:
    """Return the number of words in Markdown, without marks and tooltips of terms."""
    markdown = re.sub(r"\[([^]\n]+)\]\(glossary\.md [^)\n]+\)", r"\1", markdown)
    return len(re.sub(r"[#|*`$\-:>]", " ", markdown).split())


def lines(code: str) -> int:
    """Return the number of lines of code that are not blank."""
    return sum(bool(line.strip()) for line in code.splitlines())


def shown_lines(output: dict) -> int:
    """Return the lines of source in an output: code fences, and what a diff changes.

    Source that is folded does not count: the reader decides whether to open it.
    """
    text = "".join(output.get("data", {}).get("text/markdown", ""))
    text = re.sub("<details>.*?</details>", "", text, flags=re.DOTALL)
    fences = re.findall(r"^(`{3,})\w*\n(.*?)\n\1$", text, re.DOTALL | re.MULTILINE)
    changes = text.count('<span style="background-color')
    return changes + sum(lines(fence) for _, fence in fences)


def minutes(notebook: dict) -> dict[tuple[str, str], float]:
    """Return the minutes that each (section, subsection) takes to read."""
    found: dict[tuple[str, str], float] = {}
    here = "", ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            shown = sum(map(shown_lines, cell.get("outputs", ())))
            found[here] = found.get(here, 0) + lines(source) / LINES + shown / SHOWN
            continue
        for text in re.split(r"^(?=#{1,3} )", source, flags=re.MULTILINE):
            if head := re.match("(#{1,3}) (.*)", text):
                here = (here[0], head[2]) if head[1] == "###" else (head[2], "")
            found[here] = found.get(here, 0) + words(text) / WORDS
    return found


def minutes_without(notebook: dict, left_out: set[str]) -> float:
    """Return the minutes that a chapter takes without these (sub)sections."""
    each = minutes(notebook).items()
    return sum(time for names, time in each if not {*names} & (left_out | LEFT_OUT))
