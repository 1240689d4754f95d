"""The webhook gets each alert once, and its end, whatever happens to the run or the receiver."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time

import pytest

from steadytrain.components.observe.alerts import AlertSink
from steadytrain.components.shared import webhook
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import SupervisorStarted, Warned

from support.command import wait_for
from support.written_run import Writer

BUDGET = {"observability": {"budget_usd": 1.0}}


class Receiver(http.server.BaseHTTPRequestHandler):
    """Keeps what it gets, and answers with the status of its server. None hangs."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status is None:
            self.server.hanging.set()
            self.server.released.wait()
            return
        if self.server.status == 200:
            self.server.got.append(json.loads(body))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def receiver(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.daemon_threads = True
    server.got, server.status = [], 200
    server.hanging, server.released = threading.Event(), threading.Event()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv(webhook.VARIABLE, f"http://127.0.0.1:{server.server_port}/secret-path")
    yield server
    server.released.set()
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def watched(run):
    sink = AlertSink(run.config, run.workspace, every=0.05)
    # What it has sent must be in the run's events before the next sink reads them.
    sink.close_seconds = 300.0
    yield sink
    sink.close()


def told(receiver):
    return [(item["event"], item["alert"]) for item in receiver.got]


@pytest.fixture
def costly(make_config):
    """A run that costs more than its budget."""
    run = Writer(make_config(**BUDGET))
    run.clock = time.time() - 700
    settings = {"compute": {"price_per_hour": 36.0}}
    run.emit("supervisor", SupervisorStarted, generation=0, pid=1, host="h", settings=settings)
    run.attempt(1, last=400, max_steps=500, outcome="preempted")
    return run


def test_alert_is_sent_once_even_by_the_next_supervisor(costly, receiver):
    for _ in range(2):
        with watched(costly):
            wait_for(lambda: receiver.got)
            time.sleep(0.2)
    assert told(receiver) == [("alert_firing", "SteadytrainOverBudget")]
    (message,) = receiver.got
    assert message["run"] == "tiny-1"
    assert message["text"].startswith("Run tiny-1 has cost more than its budget")
    assert message["severity"] == "critical"
    assert "budget" in message["remedy"]


def test_end_of_an_alert_is_sent_even_if_it_fired_under_another_supervisor(costly, receiver):
    with watched(costly):
        wait_for(lambda: receiver.got)
    richer = costly.config.observability.model_copy(update={"budget_usd": 1e6})
    costly.config = costly.config.model_copy(update={"observability": richer})
    with watched(costly):
        wait_for(lambda: len(receiver.got) == 2)
    assert told(receiver)[1] == ("alert_resolved", "SteadytrainOverBudget")
    assert receiver.got[1]["text"].startswith("No longer: Run tiny-1")


def test_alert_that_is_refused_is_sent_later_with_one_warning(costly, receiver):
    receiver.status = 503
    with watched(costly):
        wait_for(lambda: warnings(costly))
        time.sleep(0.3)
        receiver.status = 200
        wait_for(lambda: receiver.got)
    assert told(receiver) == [("alert_firing", "SteadytrainOverBudget")]
    (warning,) = warnings(costly)
    assert "503" in warning
    assert "secret-path" not in warning


def test_receiver_that_hangs_delays_nothing_but_the_end_and_that_briefly(
    costly, receiver, monkeypatch
):
    monkeypatch.setattr(webhook, "SECONDS", 600.0)
    receiver.status = None
    sink = AlertSink(costly.config, costly.workspace, every=0.05)
    sink.close_seconds = 0.1
    wait_for(receiver.hanging.is_set)
    sink.close()
    assert any(thread.name == sink.name for thread in threading.enumerate()), "it still waits"
    receiver.released.set()


def warnings(run):
    events = read_events(run.workspace.events)
    return [event.message for event in events if isinstance(event, Warned)]
