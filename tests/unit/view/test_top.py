"""`steadytrain top`: once, as JSON, and live on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from rich.console import Console

from steadytrain.components.shared.events.types import DecisionMade, ProblemFound
from steadytrain.pipelines.view.library import Board, Library
from steadytrain.pipelines.view.top import run_details, runs_table

from support.odd import call

SECRET = "hf_" + "c4n4ry" * 6


def text_of(rendered, width=160):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(rendered)
    return console.export_text()


@pytest.fixture
def runs(make_run):
    run = make_run("first")
    run.attempt(1, last=170, max_steps=400, outcome="failed", failure_class="gpu_oom", message="m")
    run.emit(
        "supervisor", DecisionMade, attempt=1, failure_class="gpu_oom", action="retry",
        reason=f"smaller\x1b[2J micro-batch {SECRET}",
    )  # fmt: skip
    run.attempt(2, first=100, last=400, max_steps=400)
    run.emit(
        "diagnosis", ProblemFound, attempt=2, step=300, rule="data_bound",
        evidence="steps wait 60 % of their time", remedy="raise the number of workers",
    )  # fmt: skip
    make_run("second").attempt(1, last=200, max_steps=400)
    return run


def test_table_shows_runs_with_their_figures(runs, source):
    text = text_of(runs_table(Board(source), "run", 10, 160))
    first, second = (line for line in text.splitlines() if re.match("first|second", line))
    assert re.search(r"unfinished train +400/400 .*[▁█].* 1.18 GB +2 +retry: smaller", first)
    assert second.split()[0] == "second"


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_table_fits_any_terminal(runs, source, width):
    text = text_of(runs_table(Board(source), "run", 10, width), width)
    assert all(len(line) <= width for line in text.splitlines())


def test_table_says_how_many_runs_it_leaves_out(runs, source):
    assert "and 1 more" in text_of(runs_table(Board(source), "active", 1, 160))


def test_details_show_curves_attempts_and_decisions(runs, source):
    text = text_of(run_details(Library(source).open("first")))
    for words in ("step 400 of 400", "validation loss", "0 to 170", "100 to 400"):
        assert words in text, words
    assert "retry from step 100" in text
    assert "data bound: steps wait 60 % of their time; " in text


def test_secrets_and_control_codes_do_not_reach_the_terminal(runs, source):
    library = Library(source)
    for shown in (runs_table(library.board, "run", 9, 200), run_details(library.open("first"))):
        text = text_of(shown, 200)
        assert SECRET not in text
        assert "\x1b" not in text
        assert "redacted" in text


def test_json_lists_runs_in_the_chosen_order(runs, tmp_path):
    done = call("top", "-o", "output", "--sort", "loss", "--json", folder=tmp_path)
    told = json.loads(done.out)["runs"]
    assert [item["run"] for item in told] == ["first", "second"]
    assert (told[0]["step"], told[0]["attempts"], told[0]["stage"]) == (400, 2, "train")
    done = call("top", "second", "-o", "output", "--json", folder=tmp_path)
    assert [item["run"] for item in json.loads(done.out)["runs"]] == ["second"]


def test_without_a_terminal_it_prints_once(runs, tmp_path):
    done = call("top", "-o", "output", "--limit", "1", folder=tmp_path)
    assert "and 1 more" in done.out
    assert "\x1b" not in done.out
    done = call("top", "first", "-o", "output", folder=tmp_path)
    assert "unfinished" in done.out
    assert call("top", "third", "-o", "output", folder=tmp_path).code == 2
    assert "no runs in" in call("top", "-o", "nowhere", folder=tmp_path).out


@pytest.mark.slow
def test_terminal_shows_runs_until_q_is_pressed(runs, tmp_path):
    """The keys of a real terminal, which is as it was afterwards."""
    ours, theirs = pty.openpty()
    before = subprocess.run(["stty", "-a"], stdin=theirs, capture_output=True, text=True).stdout
    command = [sys.executable, "-m", "steadytrain.pipelines.cli", "top", "-o", "output"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "140", "LINES": "30"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment
    )
    try:
        assert "sorted by active" in shown_until(ours, "sorted by active")
        os.write(ours, b"s")
        assert "sorted by run" in shown_until(ours, "sorted by run")
        os.write(ours, b"q")
        while process.poll() is None:  # read on: a full terminal stops who writes to it
            if select.select([ours], [], [], 0.2)[0]:
                os.read(ours, 1 << 16)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
    after = subprocess.run(["stty", "-a"], stdin=theirs, capture_output=True, text=True).stdout
    assert after == before


def shown_until(terminal, words):
    text, deadline = "", time.monotonic() + 600
    while words not in text and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 1 << 16).decode("utf-8", "replace")
    return text
