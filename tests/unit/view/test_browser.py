"""The pages in a real browser: live, by keyboard alone, and without a request to another host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

from steadytrain.components.shared.events.types import TrainingStep

from support.browser import chromium

pytestmark = pytest.mark.slow

TOKEN = "c4n4ry-0f-the-pages"


@pytest.fixture
def serve(output):
    """Return a function that starts the command and returns its address."""
    started = []

    def start(*options, **environment):
        command = [sys.executable, "-m", "steadytrain.pipelines.cli", "ui", "--port", "0"]
        process = subprocess.Popen(
            [*command, "-o", str(output), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        line = process.stdout.readline()
        found = re.match(r"(http://[^ ]+):(\d+) shows", line)
        assert found, line + process.stderr.read()
        return f"http://127.0.0.1:{found[2]}", process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def train_on(run, step, loss):
    run.clock += 1
    run.emit(
        "rank-0", TrainingStep, attempt=1, step=step, epoch=0.0, loss=loss, learning_rate=0.1,
        grad_norm=1.0, tokens=step, tokens_per_second=1.0, gpu_memory_used=0, memory_used=1,
    )  # fmt: skip


def press_until(page, is_there, key="Tab", most=60):
    """Press a key until something has the focus."""
    for _ in range(most):
        page.keyboard.press(key)
        if page.evaluate(f"() => {is_there}"):
            return
    raise AssertionError(f"{key} does not reach {is_there}")


def answer_login(page, token):
    """Type into the field, which Chromium focuses only some time after it loads the page."""
    page.locator("#token:focus").wait_for()
    page.keyboard.type(token)
    page.keyboard.press("Enter")


FOCUSED = "document.activeElement"


def test_pages_are_live_and_work_by_keyboard(make_run, serve):
    run, other = make_run("first", learning_rate=1e-4), make_run("second", learning_rate=3e-4)
    run.attempt(1, last=200, max_steps=400)
    other.attempt(1, last=200, max_steps=400)
    logs = run.workspace.attempts / "1"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("hello from rank 0\n")
    address, process = serve()
    with chromium(reduced_motion="reduce") as watched:
        page = watched.page
        page.goto(address)

        # The list updates by itself, and keeps what was selected and what has the focus.
        page.get_by_text("live", exact=True).wait_for()
        page.locator("#pick-first").focus()
        page.keyboard.press("Space")
        train_on(run, 210, 1.25)
        page.locator("#run-first", has_text="1.250").wait_for()
        make_run("third")
        page.locator("#run-third").wait_for()
        assert page.locator("#pick-first").is_checked()
        assert page.evaluate(f"() => {FOCUSED}.id") == "pick-first"
        assert page.evaluate(
            "() => getComputedStyle(document.querySelector('.tag')).animationName"
        ) in ("none", "")

        # By keyboard alone: compare two runs.
        press_until(page, f"{FOCUSED}.id === 'pick-second'", "Shift+Tab")
        page.keyboard.press("Space")
        press_until(page, f"{FOCUSED}.textContent.startsWith('Compare the')")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Compare 2 runs").wait_for()
        assert page.get_by_role("row", name=re.compile(r"training.learning_rate 0.000\d")).count()

        # By keyboard alone: reach a run, and open a curve as a table.
        press_until(page, f"{FOCUSED}.getAttribute('href') === '/runs/first'")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="first", exact=True).wait_for()
        press_until(page, f"{FOCUSED}.textContent === 'Loss as a table'")
        page.keyboard.press("Enter")
        page.get_by_role("table", name="Loss by step").wait_for()

        # An update leaves the open table open, and adds to it.
        page.get_by_text("live", exact=True).wait_for()
        train_on(run, 220, 1.125)
        page.get_by_role("table", name="Loss by step").get_by_text("1.125").wait_for()
        assert page.evaluate(f"() => {FOCUSED}.textContent") == "Loss as a table"

        # A rank's log follows what the rank writes.
        page.get_by_role("link", name="attempt 1, rank 0").click()
        page.get_by_text("hello from rank 0").wait_for()
        page.get_by_text("live", exact=True).wait_for()
        with (logs / "rank-0.log").open("a") as log:
            log.write("<b>and again</b>\n")
        page.get_by_text("<b>and again</b>").wait_for()

        # Every image has a name, and every control a label.
        assert (
            page.evaluate("() => [...document.querySelectorAll('svg:not([aria-label])')].length")
            == 0
        )
        assert watched.errors == []
        assert {url.split("/", 3)[2] for url in watched.requests} == {address.split("/")[2]}

        # The page says that the server is gone, and Ctrl-C ends it without a traceback.
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130
        page.get_by_text("cannot be reached").wait_for()
    assert "Traceback" not in process.stderr.read()


def test_token_opens_the_pages_and_stays_secret(make_run, serve):
    make_run("first")
    address, process = serve("--host", "0.0.0.0", STEADYTRAIN_UI_TOKEN=TOKEN)
    with chromium(color_scheme="dark") as watched:
        page = watched.page
        page.goto(f"{address}/runs/first")
        assert page.url == f"{address}/login"
        answer_login(page, "wrong")
        page.get_by_role("alert").wait_for()
        answer_login(page, TOKEN)
        page.get_by_role("link", name="first").wait_for()
        assert all(TOKEN not in url for url in watched.requests)
        assert TOKEN not in page.evaluate("() => document.cookie + document.body.innerHTML")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert TOKEN not in out + err
