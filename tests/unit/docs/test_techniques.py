"""Every technique's page says when to use it and when not, its source, its cost, and shows it."""

from __future__ import annotations

import re

import pytest

from support.snippets import ROOT, TECHNIQUES, address_of, blocks

BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
SAYS = {
    "when to use it": r"\*\*Use [^*]+\*\*|\| Use it for \|",
    "when not to use it": r"\*\*Do not use [^*]+\*\*|\| Not for \|",
    # As a link to it, or by name and year.
    "its source": r"\[[^]]+ \d{4}\]\(https://[^)]+\)|\b[A-Z]\w+(?: et al\.| and [A-Z]\w+)? \d{4}\b",
    "its cost in memory": r"(?i)\bmemory\b",
    "its cost in time": r"(?i)\btime\b|\bmicroseconds\b",
    "where that was measured": r"\]\(\.\./benchmarks\.md#[a-z-]+\)",
}


def anchors():
    """The addresses of the sections of the benchmarks page, as MkDocs makes them."""
    titles = re.findall(r"^#+ (.+)$", BENCHMARKS, re.MULTILINE)
    return {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in titles}


@pytest.mark.parametrize("page", TECHNIQUES, ids=address_of)
def test_page_of_a_technique_says_what_one_needs_to_choose_it(page):
    text = page.read_text()
    missing = [what for what, pattern in SAYS.items() if not re.search(pattern, text)]
    assert not missing
    assert [block for block in blocks("yaml") if block.page == page]


@pytest.mark.parametrize("page", TECHNIQUES, ids=address_of)
def test_cost_of_a_technique_is_in_a_section_with_figures(page):
    named = re.findall(r"\]\(\.\./benchmarks\.md#([a-z0-9-]+)\)", page.read_text())
    assert set(named) <= anchors()


def test_every_section_with_costs_of_techniques_names_its_benchmark():
    """A figure that nobody can measure again is none."""
    linked = {
        name
        for page in TECHNIQUES
        for name in re.findall(r"benchmarks\.md#([a-z0-9-]+)", page.read_text())
    }
    for section in re.split(r"^## ", BENCHMARKS, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        if re.sub(r"[^a-z0-9]+", "-", title.lower()) in linked:
            assert re.search(r"tests/bench/\w+\.py|^steadytrain ", section, re.MULTILINE), title
