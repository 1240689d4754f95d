"""What the pages show, also of hostile and of unfinished runs."""

from __future__ import annotations

import re
import threading
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.components.shared.events.types import DecisionMade, Validated
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import LocalStorage
from steadytrain.pipelines.view.library import Row
from steadytrain.pipelines.view.pages import list_page, message_page

HOSTILE = "</pre></script><script>alert('x')</script><img src=x onerror=\"y()\">&amp;{{ 7*7 }}"
SECRET = "hf_" + "c4n4ry" * 6


class Checked(HTMLParser):
    """Collects what a strict Content-Security-Policy would refuse, and what screen readers need."""

    def __init__(self, text):
        super().__init__()
        self.refused, self.ids, self.labels, self.controls, self.tags = [], [], set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.refused += [name for name in given if name.startswith("on") or name == "style"]
        for name in ("src", "href", "action"):
            if not given.get(name, "/").startswith(("/", "#", "?")):
                self.refused.append(given[name])
        if tag == "style" or (tag == "script" and "src" not in given):
            self.refused.append(tag)
        if tag == "label":
            self.labels.add(given["for"])
        if tag == "input" and given.get("type") != "hidden" and "aria-label" not in given:
            self.controls.append(given["id"])


def check(text):
    page = Checked(text)
    assert page.refused == []
    assert len(page.ids) == len(set(page.ids))
    assert set(page.controls) <= page.labels
    assert page.tags.count("h1") == page.tags.count("main") == 1
    assert "html" in page.tags
    return page


@pytest.fixture
def trained(make_run):
    run = make_run("first", learning_rate=1e-4)
    run.attempt(1, last=170, max_steps=400, outcome="failed", failure_class="gpu_oom", message="m")
    run.emit(
        "supervisor", DecisionMade, attempt=1, failure_class="gpu_oom", action="retry",
        reason="smaller micro-batch",
    )  # fmt: skip
    run.attempt(2, first=100, last=400, max_steps=400)
    run.trained(steps=400, attempts=2)
    other = make_run("second", learning_rate=3e-4)
    other.attempt(1, last=200, max_steps=400)
    logs = run.workspace.attempts / "2"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("hello from rank 0\n")
    (logs / "node-0").mkdir()
    (logs / "node-0" / "log").write_text("hello from the agent\n")
    return run


def get(client, path, status=200):
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    if answer.headers["content-type"].startswith("text/html"):
        check(answer.text)
    return answer.text


def test_page_that_cannot_be_made_says_so(client, trained, monkeypatch, capsys):
    def fails(*_, **__):
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr("steadytrain.pipelines.view.pages.list_page", fails)
    text = get(client, "/", status=500)
    assert "unexpected ZeroDivisionError" in text
    assert "by chance" not in text
    assert "ZeroDivisionError: by chance" in capsys.readouterr().err


def test_list_shows_every_run(client, trained):
    text = get(client, "/")
    assert "2 runs, sorted by last event" in text
    assert re.search(r'href="/runs/first">first</a>.*unfinished.*400.*of 400', text, re.DOTALL)
    assert text.count('class="spark"') == 2


@pytest.mark.parametrize(
    ("query", "order"),
    [
        ("sort=run", ["first", "second"]),
        ("sort=attempts", ["first", "second"]),
        ("sort=step", ["first", "second"]),
        ("sort=nonsense&page=99", ["second", "first"]),
        ("page=-1&q=sec", ["second"]),
        ("q=none", []),
        ("page=9999999999999999999", ["second", "first"]),
    ],
)
def test_list_can_be_sorted_and_filtered(client, trained, query, order):
    text = get(client, f"/?{query}")
    assert re.findall(r'<th scope="row"><a href="/runs/(\w+)"', text) == order


def test_list_has_pages_of_fifty_runs(client, output):
    for number in range(80):
        (output / "runs" / f"run-{number:03}").mkdir(parents=True)
    first, second = get(client, "/?sort=run"), get(client, "/?sort=run&page=2")
    assert (first.count("/runs/"), second.count("/runs/")) == (50, 30)
    assert 'rel="next"' in first
    assert 'rel="prev"' in second


def test_page_of_a_run_shows_all_of_it(client, trained):
    text = get(client, "/runs/first")
    for words in (
        "name-of-first",
        "rank 0",
        "smaller micro-batch",
        "Timeline. 2 attempts",
        "attempts/2/rank-0.log",
        "attempts/2/node-0/log",
        "Loss as a table",
        "Predicted",
        "learning_rate: 0.0001",
        "attempt 2 started at step 100",
    ):
        assert words in text, words


def test_numbers_of_a_curve_are_also_in_a_table(client, trained):
    text = get(client, "/runs/first")
    table = text.partition("<caption>Loss by step</caption>")[2].partition("</table>")[0]
    assert table.count("<tr>") > 10
    assert '<th scope="row">400</th>' in table


def test_comparison_shows_curves_results_and_differences(client, trained):
    text = get(client, "/compare?run=first&run=second&run=first")
    assert "Compare 2 runs" in text
    differences = text.partition("Differences of the configurations")[2]
    assert re.search("training.learning_rate</th>.*>0.0001</td>.*>0.0003</td>", differences)
    assert "model.config" not in differences
    assert 'class="line c1"' in text


@pytest.mark.parametrize("query", ["", "run=first", "&".join(f"run=r{n}" for n in range(11))])
def test_comparison_needs_two_to_ten_runs(client, trained, query):
    assert "select two to 10 runs" in get(client, f"/compare?{query}", 404)


def test_log_shows_its_end(client, trained):
    path = trained.workspace.attempts / "2" / "rank-0.log"
    path.write_text(
        "\n".join(f"line {number}" for number in range(100_000)) + "\n\x1b[31mred\x1b[0m"
    )
    text = get(client, "/runs/first/log?file=attempts/2/rank-0.log")
    assert "line 99999\nred</pre>" in text
    assert "line 1\n" not in text
    assert "only the end is shown" in text
    assert len(text) < 200_000


@pytest.mark.parametrize(
    "path",
    [
        "/runs/no-such",
        "/runs/%2e%2e%2fsecret",
        "/runs/first/log",
        "/runs/first/log?file=config.yaml",
        "/runs/first/log?file=../../../../etc/passwd",
        "/static/pages.py",
        "/static/../pages.py",
        "/x",
    ],
)
def test_what_is_not_a_page_is_not_found(client, trained, path):
    assert "root:" not in get(client, path, 404)


def test_link_in_place_of_a_log_is_not_followed_out_of_a_pipe(client, trained):
    path = trained.workspace.attempts / "2" / "rank-1.log"
    path.symlink_to("/dev/zero")
    assert "rank-1" not in get(client, "/runs/first")


def test_empty_and_missing_folders_are_empty_lists(client, output):
    assert "There are no runs here yet" in get(client, "/")
    (output / "runs" / "empty").mkdir(parents=True)
    assert "has not started a step" in get(client, "/runs/empty")
    assert ">empty</span>" in get(client, "/")


def test_damaged_files_are_shown_as_far_as_they_are_whole(client, trained):
    trained.workspace.config.write_text("a: [")
    trained.workspace.record("train").write_text("{")
    (trained.workspace.events / "odd.jsonl").write_bytes(b"\xff\x00 no event\n" * 10)
    text = get(client, "/runs/first")
    assert "Could not be read" in text
    assert "Timeline. 2 attempts" in text


def test_run_is_running_while_a_process_holds_it(client, trained):
    with hold(LocalStorage(trained.workspace.lease), run_id="first", seconds=30.0):
        assert ">running</span>" in get(client, "/")
        assert "first is running: train is done" in get(client, "/runs/first")
    assert ">running</span>" not in get(client, "/")


def test_hostile_text_stays_text(client, make_run):
    run = make_run("odd")
    run.attempt(
        1, last=100, max_steps=100, outcome="failed", failure_class=HOSTILE, message=HOSTILE,
        remedy=HOSTILE,
    )  # fmt: skip
    run.warn(HOSTILE)
    run.warn("\x1b[31mred\x1b[0m \x07\x1b]0;title\x07 " + SECRET[:9] + "\x1b[m" + SECRET[9:])
    run.emit("rank-0", Validated, attempt=1, step=101, epoch=1.0, metrics={HOSTILE: 0.5}, best=True)
    run.fail("train", HOSTILE, HOSTILE, HOSTILE)
    run.workspace.config.write_text(f"name: {HOSTILE!r}\nother: {HOSTILE!r}\n")
    (run.workspace.attempts / "1").mkdir(parents=True)
    (run.workspace.attempts / "1" / "rank-0.log").write_text(HOSTILE)
    make_run("plain").attempt(1, last=100, max_steps=100)
    (run.workspace.output / "runs" / HOSTILE.replace("/", "")).mkdir()
    for path in (
        "/",
        "/runs/odd",
        "/runs/odd/log?file=attempts/1/rank-0.log",
        "/compare?run=odd&run=plain",
        f"/?q={HOSTILE}",
        f"/runs/{HOSTILE}",
    ):
        answer = client.get(path)
        check(answer.text)
        assert "<script>alert" not in answer.text
        assert "<img" not in answer.text
        assert not set(answer.text) & {"\x1b", "\x07"}
        assert SECRET not in answer.text
        assert "49" not in re.findall(r"\{\{.*?\}\}|&amp;49", answer.text)


@settings(max_examples=20)
@given(words=st.text(max_size=40))
def test_any_text_is_escaped(words):
    row = Row("a", decision=words)
    text = list_page(words, [row], sort="run", words=words, page=1, total=1)
    check(text)
    check(message_page(words, words, words, words))


def test_secrets_reach_no_page(client, make_run):
    run = make_run("leaky")
    run.attempt(
        1, last=100, max_steps=100, outcome="failed", message=f"token {SECRET}", remedy=SECRET
    )
    run.warn(f"cannot use https://user:{SECRET}@example.com")
    run.fail("train", "Error", SECRET, SECRET)
    run.workspace.config.write_text(f"name: x\nmodel: {{base: {SECRET}}}\n")
    (run.workspace.attempts / "1").mkdir(parents=True)
    (run.workspace.attempts / "1" / "rank-0.log").write_text(f"HF_TOKEN={SECRET}\n")
    make_run("other")
    for path in (
        "/",
        "/runs/leaky",
        "/runs/leaky/log?file=attempts/1/rank-0.log",
        "/compare?run=leaky&run=other",
    ):
        text = get(client, path)
        assert SECRET not in text, path
    assert "[redacted]" in get(client, "/runs/leaky")


def test_threads_may_ask_at_once(client, trained):
    answers = []
    ask = lambda: answers.append(client.get("/runs/first").status_code)  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 8


def test_only_logs_of_ranks_and_agents_are_listed(client, trained):
    for name in ("odd/rank-0.log", "1/other.log", "1/rank-0.log.old", "1/node-0/other"):
        path = trained.workspace.attempts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    listed = re.findall(r"log\?file=([^\"]+)", get(client, "/runs/first"))
    assert listed == ["attempts/2/node-0/log", "attempts/2/rank-0.log"]
