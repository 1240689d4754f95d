"""The code blocks of the README and of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TECHNIQUES = sorted(
    page
    for page in (
        *(ROOT / "docs" / "techniques").glob("*.md"),
        *(ROOT / "components" / "techniques").glob("*/page.md"),
    )
    if page.name != "index.md"
)
"""The pages of techniques, in `docs` or in the technique's folder."""
PAGES = sorted({README, *(ROOT / "docs").rglob("*.md"), *TECHNIQUES})
_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKED = ("bash", "python", "yaml", "json", "toml", "sh", "js", "sql", "py")
"""Languages of the blocks that tests check."""


@dataclass(frozen=True)
class Block:
    """A code block and its position."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def address_of(page: Path) -> str:
    """Return where the documentation has a page."""
    if page.name == "page.md":
        return f"techniques/{page.parent.name.replace('_', '-')}.md"
    return page.relative_to(ROOT / "docs").as_posix()


def blocks(language: str = "") -> list[Block]:
    """Return the blocks in a language; "" for all."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if not language or match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(page, line, match[1], match[2]))
    return found


def commands() -> Iterator[tuple[str, str]]:
    """Yield each command in the bash blocks, without its comment, and its position."""
    for block in blocks("bash"):
        for number, line in enumerate(block.text.splitlines(), block.line + 1):
            if command := line.partition("  # ")[0].strip():
                yield f"{block.page.relative_to(ROOT)}:{number}", command


def documented(command: str) -> set[str]:
    """Return the keys that the guide says a command's JSON has, without those of its items."""
    text = (ROOT / "docs" / "guides" / "scripts.md").read_text()
    row = text.split(f"| `steadytrain {command}` |")[1].split("\n")[0]
    return set(re.findall(r"`(\w+)`", re.sub(r": each with [^;]*;|\([^)]*\)", "", row)))
