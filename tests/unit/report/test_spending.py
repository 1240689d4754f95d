"""Where training time went: on the page, in a terminal, and as metrics."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from steadytrain.components.report.explain import summary
from steadytrain.components.report.facts import Spending, gather
from steadytrain.components.report.figures import LEFT, WIDTH, timeline
from steadytrain.components.report.report_page import render
from steadytrain.components.shared.append_log import encode
from steadytrain.components.shared.batch import BatchSettings
from steadytrain.components.shared.events.types import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    StepFinished,
)
from steadytrain.components.train.recovery.history import AttemptHistory, History
from steadytrain.components.train.recovery.times import Times, spans

DAY = 86_400.0


def bars(drawing: str) -> list[dict[str, Any]]:
    shapes = ElementTree.fromstring(drawing).iter("rect")
    return [
        {
            "kind": shape.attrib["class"],
            "x": float(shape.attrib["x"]),
            "y": float(shape.attrib["y"]),
            "width": float(shape.attrib["width"]),
            "title": shape[0].text,
        }
        for shape in shapes
    ]


def attempt(number: int, start: float, end: float, *, saves: int = 1) -> AttemptHistory:
    """Return an attempt that saves `saves` times at even intervals and ends at its last save."""
    began = AttemptStarted(
        time=start,
        attempt=number,
        world_size=1,
        batch=BatchSettings(1),
        gradient_accumulation_steps=1,
    )
    pitch = (end - start) / saves
    saved = [
        CheckpointSaved(
            time=start + pitch * index,
            attempt=number,
            step=index,
            checkpoint="c",
            bytes=1,
            seconds=pitch / 10,
        )
        for index in range(1, saves + 1)
    ]
    last = AttemptEnded(time=end, attempt=number, outcome="finished", step=saves)
    return AttemptHistory(began, None, saved, last)


def test_timeline_has_a_row_per_attempt_and_no_gap(language_model: Any) -> None:
    facts = gather(language_model.workspace)
    found = bars(timeline(facts.history.attempts, facts.spans))
    assert len({bar["y"] for bar in found if bar["kind"] == "restarting"}) == 3
    kinds = [bar["kind"] for bar in found]
    assert kinds.count("waiting") == 2
    assert kinds.count("lost") == 2
    found.sort(key=lambda bar: bar["x"])
    assert found[0]["x"] == LEFT
    for before, after in pairwise(found):
        assert before["x"] + before["width"] == pytest.approx(after["x"], abs=0.5)
    assert any(re.search(r"attempt 2: lost \d[\d.]* s, from 2023", bar["title"]) for bar in found)


def test_long_wait_is_shortened_and_labeled() -> None:
    history = History([attempt(1, 0, 60), attempt(2, 2 * DAY, 2 * DAY + 60)])
    drawing = timeline(history.attempts, spans(history))
    (wait,) = [bar for bar in bars(drawing) if "waiting" in bar["kind"]]
    assert wait["width"] < (WIDTH - LEFT) / 3
    assert "before attempt 2: waiting 2 d" in wait["title"]
    assert "drawn shorter" in wait["title"]
    assert "2 d" in drawing


@pytest.mark.slow
def test_thousands_of_attempts_and_checkpoints_give_a_small_drawing() -> None:
    many = History([attempt(number, 100.0 * number, 100.0 * number + 99) for number in range(2000)])
    assert len(timeline(many.attempts, spans(many))) < 1_500_000
    long = History([attempt(1, 0, 30 * DAY, saves=20_000)])
    drawing = timeline(long.attempts, spans(long))
    assert len(drawing) < 5_000
    assert float(ElementTree.fromstring(drawing).attrib["viewBox"].split()[3]) < 520


def test_timeline_needs_an_attempt() -> None:
    assert timeline([], []) == ""


def test_page_and_terminal_show_the_same_times(language_model: Any) -> None:
    facts = gather(language_model.workspace)
    times = Times.of(facts.spans)
    assert 0.5 < times.goodput < 1
    assert times.lost > 0
    page = render(facts)
    said = "\n".join(summary(language_model.workspace))
    assert f"goodput {100 * times.goodput:.1f} %" in page
    assert f"goodput: {times.goodput:.1%}" in said
    for kind, (took, share, meaning), _ in Spending.of(facts).rows:
        assert f'<th scope="row">{kind}</th><td class="n">{took}</td>' in page
        assert meaning in page
        assert f"{kind} {share}" in said


def test_cost_comes_from_the_price_of_an_hour(make_config: Any, bare: Any) -> None:
    bare.config = make_config(compute={"price_per_hour": 36.0})
    bare.workspace.config.write_text(bare.config.to_yaml())
    bare.attempt(1, last=100, max_steps=200, outcome="failed", failure_class="network")
    bare.clock += DAY
    bare.attempt(2, first=100, last=200, max_steps=200)
    found = Spending.of(gather(bare.workspace))
    held = found.times.wall - found.times.waiting
    assert found.metrics()["cost_usd"] == pytest.approx(held / 100)
    assert f"cost: {held / 100:,.2f} USD at 36.00 USD per hour" in "\n".join(found.lines())


def test_clock_set_forward_costs_nothing(make_config: Any, bare: Any) -> None:
    """By the clock, training took 100 days; the attempt and the step know that it did not."""
    bare.config = make_config(compute={"price_per_hour": 36.0})
    bare.workspace.config.write_text(bare.config.to_yaml())
    bare.again()
    bare.start_step("train")
    bare.attempt(1, last=100, max_steps=100, seconds_a_step=DAY, seconds=100.0)
    bare.emit("train", StepFinished, stage="train", seconds=103.0)
    facts = gather(bare.workspace)
    found = Spending.of(facts)
    assert found.metrics()["cost_usd"] == pytest.approx(1)
    assert found.metrics()["training_duration_seconds"] == pytest.approx(100)
    said = "\n".join(summary(bare.workspace))
    assert "steps: begin 0.1 s, train 1 min 43 s; 1 min 43 s in all" in said
    page, row = render(facts), r'<td class="n">1 min 40 s</td>'
    assert re.search(row, page)
    for text in (page, said, timeline(facts.history.attempts, facts.spans)):
        assert "100 d" not in text


def test_attempt_of_a_dead_supervisor_counts_to_its_last_heartbeat(bare: Any) -> None:
    bare.attempt(1, last=40, max_steps=100)
    for path in bare.workspace.events.iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if "attempt_ended" not in line))
    facts = gather(bare.workspace)
    bare.clock += DAY
    bare.start_step("report")
    assert facts.spans[-1].end == facts.events[-1].time
    assert "no end" in timeline(facts.history.attempts, facts.spans)


def test_ledger_of_another_version_is_reported_on_the_page(bare: Any) -> None:
    bare.attempt(1, last=40, max_steps=100)
    first = bare.workspace.events / "ledger-00000000.jsonl"
    first.write_bytes(encode({"schema_version": 9}, 1))
    facts = gather(bare.workspace)
    assert "schema version 9" in "".join(facts.unreadable)
    assert "schema version 9" in render(facts)


@pytest.mark.parametrize("price", ["a lot", True])
def test_missing_price_is_unknown(bare: Any, price: object) -> None:
    facts = gather(bare.workspace)
    facts.config = {"compute": {"price_per_hour": price}}
    assert Spending.of(facts).cost.startswith("not known")
    assert Spending.of(facts).metrics() == {}
    assert Spending.of(facts).lines() == []
