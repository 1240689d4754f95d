"""Reject phrases that read like a translation, and suggest the plain wording.

`make lint` runs this on the code, the tests, the docs and the names of tests. The table in
CONTRIBUTING.md quotes such phrases, and so do this file and its test; they are exempt.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

PHRASES = {
    r"mend(?:s|ed|ing)?": "fix",
    r"anew": "again, or a verb with re-",
    r"(?:are|is) (?:other ones|another one) than": "differs from",
    r"other ones": "others, or: differ",
    r"(?:drawn|draws|chosen) by lot": "sample at random",
    r"go(?:es|ing)? on with": "continue",
    r"(?:goes|gone) on(?: from| after| without)": "continue",
    r"(?:run|training) goes on": "the run continues",
    r"(?:is|are|was) worked on": "is in use, or: runs",
    r"nobody works on": "is not running",
    r"(?:is|are) at work": "is running",
    r"(?:is|are|was|were|be) told": "is reported, or: the plan shows",
    r"of late": "recently",
    r"stands twice": "appears twice",
    r"for want of": "because ... ran out, or: without",
    r"knows no(?:ne)?": "has no, or: does not support",
    r"comes? to nothing": "fails",
    r"a training(?= (?:is|has|that|takes|needs|gets|begins|ends|runs out)\b|[.,;:)])": "a run",
    r"has not begun": "has not started",
    r"would come again": "would happen again",
    r"can be counted on": "is usable",
    r"without a word": "without an error message",
    r"nobody listens": "nothing is listening",
    r"this product": "steadytrain",
    r"as often as pays": "name the rule, such as Young's interval",
    r"take it out of one of them": "set it in one place only",
    r"is no (?:number|file|folder|pattern|mapping|manifest|zone|pipeline)": "is not a",
    r"refused are": "put the subject first: it refuses",
    r"so that another \w+ could": "so another ... could",
}
"""Regular expressions of what nobody says, and what to write instead."""

FOLDERS = ("components", "pipelines", "docs", "docker", "manifests", "tests")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
SUFFIXES = {".j2", ".md", ".py", ".sh", ".toml", ".yaml"}
EXEMPT = ("tests/unit/package/test_prose.py",)

_GAP = r"(?:[\s#]|\"\s+f?\")+"  # a phrase may continue on the next line of a comment or literal
_COMPILED = [
    (re.compile(rf"\b{phrase.replace(' ', _GAP)}(?!\w)", re.IGNORECASE), instead)
    for phrase, instead in PHRASES.items()
]
_TEST = re.compile(r"def test_\w+")


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the phrase and the better wording of each rejected phrase in a text."""
    text = _TEST.sub(lambda found: found[0].replace("_", " "), text)
    for pattern, instead in _COMPILED:
        for found in pattern.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def check(root: Path) -> list[str]:
    """Return a line for each rejected phrase in a checkout: file, line, phrase, better wording."""
    pages = [root / page for page in PAGES]
    for folder in FOLDERS:
        pages += sorted(path for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)
    problems = []
    for page in pages:
        name = page.relative_to(root).as_posix()
        if name in EXEMPT or not page.is_file():
            continue
        text = page.read_text(encoding="utf-8")
        if name == "CONTRIBUTING.md":
            text = re.sub(r"^\|.*", "", text, flags=re.MULTILINE)
        problems += [
            f"{name}:{line}: {phrase!r}: write {instead!r}"
            for line, phrase, instead in sorted(findings(text))
        ]
    return problems


if __name__ == "__main__":
    found = check(Path(__file__).parent.parent)
    sys.exit("\n".join(found) if found else 0)
