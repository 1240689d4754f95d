from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from steadytrain.components.report.explain import summary
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import render
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import (
    LayersCounted,
    NoiseScaleMeasured,
    TrainingStep,
)
from steadytrain.components.shared.records import EvaluationRecord, Interval
from steadytrain.components.shared.tracking.notes import RUN, remember
from steadytrain.components.shared.workspace import Workspace

RUNS = ("language_model", "classifier", "failed", "long_run", "hostile", "bare")


class Page(HTMLParser):
    """A page's elements, and its visible text by section. Fails if tags do not match."""

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()
        self.html = render(gather(workspace))
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {"": ""}
        self._open: list[str] = []
        self._section = ""
        self.feed(self.html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag == "section":
            self._section = attributes["id"] or ""
            self.sections[self._section] = ""
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "section":
            self._section = ""

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.sections[self._section] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def top(self) -> str:
        return self.sections[""]


@pytest.fixture
def page(request: pytest.FixtureRequest) -> Page:
    return Page(request.getfixturevalue(request.param).workspace)


@pytest.mark.parametrize("page", RUNS, indirect=True)
def test_page_needs_nothing_else_and_runs_nothing(page: Page) -> None:
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "form", "base"}
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or "#").startswith("#")
    assert "url(" not in page.html
    assert "@import" not in page.html


@pytest.mark.parametrize("page", RUNS, indirect=True)
def test_page_is_accessible(page: Page) -> None:
    tags = [tag for tag, _ in page.elements]
    assert page.named("html")[0]["lang"] == "en"
    assert tags.count("h1") == 1
    assert tags.count("table") == tags.count("caption")
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.named("th"))
    levels = [int(tag[1]) for tag in tags if re.fullmatch("h[1-6]", tag)]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for drawing in page.named("svg"):
        assert drawing["role"] == "img"
        assert len(drawing["aria-label"] or "") > 10
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    for section in page.named("section"):
        assert section["aria-labelledby"] in ids
    assert {link["href"] for link in page.named("a")} == {
        f"#{name}" for name in page.sections if name
    }


@pytest.mark.parametrize("page", ["language_model", "classifier", "hostile"], indirect=True)
def test_drawings_are_well_formed(page: Page) -> None:
    drawings = re.findall(r"<svg.*?</svg>", page.html, re.DOTALL)
    assert len(drawings) >= 6
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for line in root.iter("polyline"):
            for pair in line.attrib["points"].split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_codes_of_a_terminal_do_not_reach_the_page(bare: Any) -> None:
    bare.start_step("train")
    bare.fail("train", "TrainingFailed", "\x1b[31mloss\x1b[0m is\x07 nan", "try\x1b[2J again")
    page = Page(bare.workspace)
    assert "loss is nan" in page.html
    assert not set(page.html) & {"\x1b", "\x07"}


def test_hostile_text_is_only_text(hostile: Any, hostile_text: str) -> None:
    page = Page(hostile.workspace)
    assert "<script" not in page.html
    assert "<img" not in page.html
    for section in ("data", "training", "attempts", "evaluation", "gate"):
        assert hostile_text in page.sections[section], section
    assert hostile_text in page.top
    assert "alert" in "\n".join(summary(hostile.workspace))


def test_promoted_language_model(language_model: Any) -> None:
    page = Page(language_model.workspace)
    assert "Finished" in page.top
    assert "registered as version 3 of stdlib-lm, the new champion" in page.top
    assert "promoted: bits_per_byte 0.8127 against 0.8541 of version 2" in page.top
    assert "exact_duplicate" in page.sections["data"]
    assert re.search(r"train.*validation.*test", page.sections["data"], re.DOTALL)
    assert "package:stdlib" in page.sections["data"]
    attempts = page.sections["attempts"]
    for text in ("host_oom", "preempted", "finished", "100 to 260", "130 steps were taken twice"):
        assert text in attempts
    assert "give the machine more memory" in attempts
    evaluation = page.sections["evaluation"]
    for text in ("9.405", "9.117 to 9.693", "5.912", "2.144 unigram", "uniform", "asyncio"):
        assert text in evaluation
    assert re.search(r"cloze/acc\s*0.4375\s*0.03120\s*96\s*higher is better", evaluation)
    gate = page.sections["gate"]
    for text in ("0.8127", "0.8541", "version 2", "4.1% to 5.6%", "Floor for perplexity", "3.1%"):
        assert text in gate
    assert "Cost: not known" in page.sections["time"]
    assert "connection refused" in page.sections["steps"]
    assert "(2 times)" in page.sections["steps"]
    assert "python" in page.sections["environment"]
    assert "learning_rate: null" in page.sections["environment"]
    training = page.sections["training"]
    for text in ("training.learning_rate", "1e-4", "the rule's reason", "(open)", "Young"):
        assert text in training


def test_clipped_steps_are_counted_over_all_attempts(language_model: Any) -> None:
    page = Page(language_model.workspace)
    steps = [
        event
        for event in read_events(language_model.workspace.events)
        if isinstance(event, TrainingStep)
    ]
    newest = {event.attempt: event.clipped_steps for event in steps}
    assert len(newest) == 3
    # 400 steps, and 130 that were taken twice.
    count = sum(newest.values())
    assert f"Clipped steps{count / 530:.1%}{count} of 530, by training.max_grad_norm" in page.top


def test_numbers_to_predict_are_described_by_side(classifier: Any) -> None:
    numbers = {"min": 0.5, "median": 3.25, "max": 12345.75}
    sides = {name: {"numbers": numbers} for name in ("train", "validation", "test")}
    classifier.preprocess(labels=(), card={"sides": sides})
    found = Page(classifier.workspace).sections["data"]
    assert "Numbers to predict" in found
    assert found.count("12,346") == 3
    assert "Label balance" not in found


def test_classifier_that_is_not_promoted(classifier: Any) -> None:
    page = Page(classifier.workspace)
    assert "registered as version 5 of packages, not promoted" in page.top
    assert "not promoted: accuracy 0.9134 against 0.9207" in page.top
    assert "Validation accuracy" in page.sections["training"]
    assert "Label balance" in page.sections["data"]
    cells = [cell for cell in page.named("td") if cell.get("class") in ("hit", "miss")]
    assert len(cells) == 64
    assert len([cell for cell in cells if cell["class"] == "hit"]) == 8
    shares = [float((cell["style"] or "").partition(":")[2]) for cell in cells]
    assert all(0 <= share <= 1 for share in shares)
    evaluation = page.sections["evaluation"]
    assert "Most frequent confusions" in evaluation
    assert "expected calibration error 0.0312" in evaluation
    assert "Precision and recall: " in evaluation
    charts = [svg.get("aria-label") or "" for svg in page.named("svg")]
    assert any("95.0% confidence, 97.0% correct (400 examples)" in label for label in charts)


def test_many_classes_are_listed_not_drawn(language_model: Any) -> None:
    count = 40
    labels = [f"class-{index}" for index in range(count)]
    confusion = [[5 if row == column else 0 for column in range(count)] for row in range(count)]
    confusion[3][7] = 9
    EvaluationRecord(
        weights_digest="w",
        task="sequence_classification",
        examples=209,
        metrics={"accuracy": Interval(value=0.9, low=0.8, high=1)},
        labels=labels,
        confusion=confusion,
        scores="s",
    ).save(language_model.workspace.record("evaluate"))
    page = Page(language_model.workspace)
    assert "Confusion matrix" not in page.sections["evaluation"]
    assert re.search(r"class-3\s*class-7\s*9", page.sections["evaluation"])


def test_failure_comes_with_its_remedy(failed: Any) -> None:
    page = Page(failed.workspace)
    assert "stdlib-lm failed in train" in page.top
    assert "the loss is not finite at step 160" in page.top
    assert "lower training.learning_rate" in page.top
    assert "training not finite at 3 logged steps" in page.sections["training"]
    assert "has not been evaluated" in page.sections["evaluation"]
    assert "has not decided" in page.sections["gate"]
    assert [shape for shape in page.named("path") if shape.get("class") == "broken"]
    said = summary(failed.workspace)
    assert said[0] == "stdlib-lm failed in train."
    assert any(line.startswith("fix: lower training.learning_rate") for line in said)


def test_failed_continuation_shows_no_old_success(language_model: Any) -> None:
    language_model.clock += 60
    language_model.again()
    language_model.start_step("preprocess")
    language_model.fail("preprocess", "DataError", "half of the records are broken")
    page = Page(language_model.workspace)
    assert "failed in preprocess" in page.top
    assert "Version" not in page.top
    assert not [line for line in summary(language_model.workspace) if line.startswith("gate")]


@pytest.mark.slow
def test_long_run_stays_small(long_run: Any) -> None:
    page = Page(long_run.workspace)
    assert len(page.html) < 150_000
    assert "13 h" in page.sections["time"]


def test_missing_records_are_reported(bare: Any) -> None:
    page = Page(bare.workspace)
    assert "has not started a step" in page.top
    for section, text in {
        "steps": "No step has started",
        "data": "not been prepared",
        "training": "No training step",
        "attempts": "not been attempted",
        "environment": "did not record",
    }.items():
        assert text in page.sections[section]
    assert summary(bare.workspace) == [f"Run {bare.workspace.run_id} has not started a step."]


def test_unreadable_records_are_reported(language_model: Any) -> None:
    workspace = language_model.workspace
    workspace.record("evaluate").write_text('{"torn')
    workspace.config.write_text("name: [")
    facts = gather(workspace)
    assert facts.data is not None
    facts.data.path("card.json").write_text('{"records": "many"}')
    page = Page(workspace)
    told = page.sections["steps"]
    for text in ("Could not be read", "evaluate.json", "config.yaml", "card.json"):
        assert text in told
    assert "has not been evaluated" in page.sections["evaluation"]


def test_missing_folder_is_reported(bare: Any) -> None:
    nowhere = Workspace(bare.workspace.output, "never-begun")
    page = Page(nowhere)
    assert "never-begun" in page.top
    assert not nowhere.folder.exists()


def test_secrets_do_not_reach_the_page(bare: Any) -> None:
    token = "hf_" + "a" * 34
    with bare.workspace.config.open("a") as handle:
        handle.write(f"note: {token}\n")
    page = Page(bare.workspace)
    assert token not in page.html
    assert "[redacted]" in page.sections["environment"]


def test_mlflow_run_is_named(language_model: Any) -> None:
    remember(language_model.workspace, RUN, "4c3e1ae2b619")
    assert "4c3e1ae2b619" in Page(language_model.workspace).sections["environment"]


def test_summary_of_a_promoted_run(language_model: Any) -> None:
    said = summary(language_model.workspace)
    assert said[0].endswith("registered as version 3 of stdlib-lm, the new champion.")
    assert "attempts: 1 failed, 2 preempted, 3 finished" in said
    assert any(line.startswith("test: loss 2.241 (2.210 to 2.271)") for line in said)
    assert said[-1].startswith("gate: promoted: bits_per_byte")


@pytest.mark.slow
def test_neither_torch_nor_mlflow_nor_matplotlib_is_imported(language_model: Any) -> None:
    workspace = language_model.workspace
    program = f"""
import sys
from pathlib import Path
from steadytrain.components.report.facts import gather
from steadytrain.components.report.report_page import render
from steadytrain.components.report.explain import summary
from steadytrain.components.shared.workspace import Workspace
workspace = Workspace(Path({str(workspace.output)!r}), {workspace.run_id!r})
assert "champion" in render(gather(workspace))
summary(workspace)
loaded = {{"torch", "mlflow", "matplotlib", "numpy", "transformers"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_noise_scale_is_drawn_next_to_the_batch_size(language_model) -> None:
    assert "Critical batch size" not in Page(language_model.workspace).html
    for step, size in ((10, None), (20, 40.0), (30, 60.0)):
        language_model.emit(
            *("rank-0", NoiseScaleMeasured),
            attempt=3, step=step, noise=1.0, signal=0.1, critical_batch_size=size,
        )  # fmt: skip
    training = Page(language_model.workspace).sections["training"]
    assert "critical batch size 60 at step 30; global batch size 32 at step 30" in training


def test_newest_histograms_of_layers_are_a_table(language_model) -> None:
    assert "highest, at step" not in Page(language_model.workspace).html
    for step in (10, 20):
        language_model.emit(
            *("rank-0", LayersCounted),
            attempt=3, step=step, gradient={"head": [-2.0, 4.0, 8, 0, 4]},
            weight={"model.layers.0": [-0.5, 0.5, 0, step, 40], "head": [-1, 1, 1, 1, 0]},
        )  # fmt: skip
    page = Page(language_model.workspace)
    training = page.sections["training"]
    assert "highest, at step 20" in training
    assert "highest, at step 10" not in training
    # A frozen layer has no gradients. The highest bar is that of the most values.
    shown = " ".join(training[training.index("highest, at step 20") :].split())
    assert "model.layers.0-0.5000 ▁▅█ 0.5000none head-1 ██▁ 1-2 █▁▅ 4 " in shown


@pytest.mark.parametrize("page", ["language_model"], indirect=True)
def test_landscape_is_a_picture_with_words_and_numbers(page: Page) -> None:
    (chart,) = [item for item in page.named("svg") if "landscape" in (item["class"] or "")]
    assert chart["role"] == "img"
    words = "Loss 2.250 at the trained weights, 4.500 to 9.375 at a distance of 1"
    assert words in (chart["aria-label"] or "")
    section = page.sections["evaluation"]
    assert words in section
    assert "not finite at 1 of 9 points" in section
    assert "6.429" in section
    assert "1, -1: not finite" in section
