"""The pages of the documentation, and what stands in their code blocks."""

import contextlib
import dataclasses
import io
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)

FENCE = re.compile(
    r"^(?P<mark>`{3,}|:{3,})(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=mark)[ ]*$", re.M | re.S
)
NEEDS = re.compile(r"^% needs: (.+)$", re.M)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, the line it starts on, what stands before it."""

    kind: str
    text: str
    line: int
    follows_code: bool


def needs(page: pathlib.Path) -> list[str]:
    """Modules that the code of a page imports and that no test run needs, by `% needs: a b`."""
    found = NEEDS.search(page.read_text())
    return found[1].split() if found else []


def blocks(page: pathlib.Path) -> list[Block]:
    """The fenced blocks of a page, in order; also those inside of tabs and notes."""
    return list(_blocks(page.read_text(), 1))


def _blocks(text: str, first: int):
    end, before = 0, ""
    for found in FENCE.finditer(text):
        kind = found["kind"].strip()
        line = first + text.count("\n", 0, found.start())
        if kind.startswith("{") and not kind.startswith(("{code-block}", "{raw}", "{toctree}")):
            yield from _blocks(found["text"], line + 1)
        else:
            follows = before == "python" and not text[end : found.start()].strip()
            yield Block(kind, found["text"], line + 1, follows)
        end, before = found.end(), kind


def run(page: pathlib.Path, alone: bool = False) -> int:
    """Runs the Python blocks of a page one after another, as a reader would who types them.

    A `text` block directly after one is what it prints.

    Args:
      page: a file of Markdown.
      alone: whether each block needs none of those before it.

    Returns:
      How many blocks ran.
    """
    namespace, printed, count = {"__name__": "__main__"}, "", 0
    for block in blocks(page):
        if block.kind == "python":
            namespace = {"__name__": "__main__"} if alone else namespace
            out = io.StringIO()
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed, count = out.getvalue(), count + 1
        elif block.kind == "text" and block.follows_code:
            where = f"{page}, line {block.line}"
            assert _lines(printed) == _lines(block.text), f"{where}: the page says otherwise"
    return count


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]
