"""The README is short, every picture and link is there, and each figure stands in one place."""

from __future__ import annotations

import re

import pytest

from steadytrain.components.shared import plugins
from steadytrain.components.shared.config import RunConfig, TrainingConfig
from steadytrain.components.tasks.base import load_task

from support.snippets import CHECKED, PAGES, README, ROOT, TECHNIQUES, address_of, blocks

LINK = re.compile(r"!?\[[^]]*\]\(([^)#]+)(?:#[^)]*)?\)")
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
MEASURED = re.compile(
    r"\d[\d,]*(?:\.\d+)? (?:%|times\b|MB\b|min\b)|\d+\.\d+ (?:s|ms|GB)\b|\d+\.\d+e-\d+"
)

OTHERS = [page for page in PAGES if page != BENCHMARKS]


def test_readme_has_at_most_900_words():
    assert len(README.read_text().split()) <= 900


@pytest.mark.parametrize("address", LINK.findall(README.read_text()))
def test_readme_links_resolve(address):
    # MkDocs checks the links of all other pages.
    assert (ROOT / address).exists()


def test_picture_of_a_report_is_small():
    assert (ROOT / "docs" / "images" / "report.png").stat().st_size < 200_000


def test_every_code_block_names_its_language():
    odd = [str(block) for block in blocks() if block.language not in CHECKED]
    assert not odd


def test_home_page_names_every_guide():
    home = (ROOT / "docs" / "index.md").read_text()
    guides = {path.name for path in (ROOT / "docs" / "guides").iterdir()}
    assert guides == set(re.findall(r"guides/([a-z0-9-]+\.md)", home))


def test_overview_names_every_technique():
    overview = (ROOT / "docs" / "techniques" / "index.md").read_text()
    named = {f"techniques/{name}" for name in re.findall(r"\]\(([a-z0-9-]+\.md)\)", overview)}
    assert named == {address_of(page) for page in TECHNIQUES}


def test_overview_names_the_tasks_whose_loss_includes_an_objective():
    overview = (ROOT / "docs" / "techniques" / "index.md").read_text()
    rows = re.findall(r"^\| .*\(`training\.(\w+)`.*?\) \| ([^|]*) \|", overview, re.MULTILINE)
    named = dict[str, set[str]]()
    for field, tasks in rows:
        named.setdefault(field, set()).update(re.findall(r"`(\w+)`", tasks))
    ours = [name for name in plugins.names(plugins.TASKS) if plugins.is_ours(plugins.TASKS, name)]
    objectives = {name: load_task(name).objectives for name in ours}
    for field in TrainingConfig.all_objectives():
        assert named[field] == {name for name in ours if field in objectives[name]}, field


def test_every_technique_with_settings_has_a_page():
    folders = {path.parent for path in (ROOT / "components" / "techniques").glob("*/__init__.py")}
    assert folders == {page.parent for page in TECHNIQUES if page.name == "page.md"}


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_measured_figures_are_only_on_the_benchmarks_page(page):
    measured = set(MEASURED.findall(BENCHMARKS.read_text()))
    assert len(measured) > 40
    assert not measured & set(MEASURED.findall(page.read_text()))


@pytest.mark.parametrize("path", re.findall(r"tests/bench/\w+\.py", BENCHMARKS.read_text()))
def test_documented_benchmarks_exist(path):
    assert (ROOT / path).is_file()


def test_every_benchmark_is_documented():
    named = re.findall(r"tests/bench/(\w+\.py)", BENCHMARKS.read_text())
    assert set(named) == {path.name for path in (ROOT / "tests" / "bench").glob("test_*.py")}


PATH = re.compile(r"`((?:components|pipelines|manifests|tests|docker|docs)/[\w./-]+)`")


@pytest.mark.parametrize(
    "path", sorted({p for page in PAGES for p in PATH.findall(page.read_text())})
)
def test_documented_paths_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_documented_fields_exist(page):
    """In backticks: training.max_steps, or compute.pods for a section."""
    sections = "|".join(RunConfig.model_fields)
    for name in re.findall(rf"`((?:{sections})\.[a-z_.]+)[`:=]", page.read_text()):
        model = RunConfig
        for part in name.split("."):
            assert part in model.model_fields, name
            model = model.model_fields[part].annotation


def test_few_files_show_a_behavior():
    """The files that CONTRIBUTING lists exist, and are no more than it says."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.partition("## Where to follow a behavior")[2].partition("\n## ")[0]
    found = re.findall(r"^- .*, at most (\d+) files: (.*)$", section, re.MULTILINE)
    assert [int(most) for most, _ in found] == [8, 6, 4]
    for most, listed in found:
        files = re.findall(r"`(\w+/[\w/]+\.py)`", listed)
        assert 1 < len(files) <= int(most)
        assert all((ROOT / "components" / name).is_file() for name in files)
