"""The webhook, with real servers that listen, refuse, or hang."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from steadytrain.components.report.step import kfp_report, notify
from steadytrain.components.shared import webhook
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned

SECRET = "T0KEN-in-the-path"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, str]]]]:
    """Start a server with a given status, set the webhook variable, and return what it receives."""
    servers = []

    def start(status: int = 200, *, slowly: bool = False) -> list[dict[str, str]]:
        told: list[dict[str, str]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                assert self.headers["Content-Type"] == "application/json"
                if slowly:
                    self._drip()
                    return
                self.send_response(status)
                self.end_headers()

            def _drip(self) -> None:
                with contextlib.suppress(OSError):
                    while True:
                        self.wfile.write(b"H")
                        time.sleep(0.1)

            def log_message(self, *arguments: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        monkeypatch.setenv(webhook.VARIABLE, f"http://127.0.0.1:{server.server_port}/{SECRET}")
        return told

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def warnings(workspace: Any) -> list[str]:
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


def never_told(workspace: Any) -> bool:
    """Return whether the webhook address is absent from every file in the output folder."""
    files = [path for path in workspace.output.rglob("*") if path.is_file()]
    return files != [] and not any(SECRET.encode() in path.read_bytes() for path in files)


def test_failure_is_reported_once(failed: Any, listener: Any) -> None:
    told = listener()
    notify(failed.workspace)
    notify(failed.workspace)
    (message,) = told
    assert message["event"] == "failed"
    assert message["run"] == "stdlib-lm-1"
    assert message["text"] == "stdlib-lm failed in train."
    assert message["failure_class"] == "divergence"
    assert "lower training.learning_rate" in message["remedy"]
    assert message["stage"] == "train"
    assert warnings(failed.workspace) == []
    assert never_told(failed.workspace)

    failed.clock += 60
    failed.again()
    failed.start_step("train")
    failed.fail("train", "TrainingFailed", "again")
    notify(failed.workspace)
    assert len(told) == 2, "a second failure is news"


def test_promotion_is_reported_once(language_model: Any, listener: Any) -> None:
    told = listener()
    notify(language_model.workspace)
    language_model.start_step("report")
    language_model.finish("report", 1.0)
    notify(language_model.workspace)
    (message,) = told
    assert (message["event"], message["version"]) == ("promoted", "3")
    assert message["reason"].startswith("promoted: bits_per_byte")
    assert "stage" not in message


def test_unchanged_state_is_not_sent_again(classifier: Any, bare: Any, listener: Any) -> None:
    told = listener()
    notify(classifier.workspace)
    bare.start_step("train")
    bare.fail("train", "KeyboardInterrupt", "stopped")
    notify(bare.workspace)
    assert told == []


def test_killed_step_is_reported(bare: Any, listener: Any) -> None:
    told = listener()
    bare.start_step("train")
    notify(bare.workspace)
    assert told[0]["event"] == "failed"
    assert "was killed" in told[0]["text"]


def test_webhook_error_is_a_warning_and_is_retried_at_the_next_report(
    failed: Any, listener: Any
) -> None:
    told = listener(500)
    notify(failed.workspace)
    (warning,) = warnings(failed.workspace)
    assert "STEADYTRAIN_WEBHOOK_URL" in warning
    assert "it returned 500" in warning
    assert never_told(failed.workspace)
    notify(failed.workspace)
    assert len(told) == 2


@pytest.mark.parametrize("slowly", [True, False])
def test_hanging_webhook_is_abandoned(
    failed: Any, listener: Any, monkeypatch: pytest.MonkeyPatch, slowly: bool
) -> None:
    monkeypatch.setattr(webhook, "SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        if slowly:
            listener(slowly=True)
        else:
            address = f"http://127.0.0.1:{silent.getsockname()[1]}/{SECRET}"
            monkeypatch.setenv(webhook.VARIABLE, address)
        notify(failed.workspace)
    (warning,) = warnings(failed.workspace)
    assert any(reason in warning for reason in ("no answer", "timed out", "TimeoutError"))
    assert never_told(failed.workspace)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (f"http://127.0.0.1:1/{SECRET}", "Connection refused"),
        (f"file:///etc/{SECRET}", "not http or https"),
        (f"http://[{SECRET}", "ValueError"),
        (f"http://host with space/{SECRET}", "InvalidURL"),
        (f"http://127.0.0.1:{SECRET}/", "InvalidURL"),
    ],
)
def test_uncallable_address_is_reported(
    failed: Any, monkeypatch: pytest.MonkeyPatch, address: str, told: str
) -> None:
    monkeypatch.setenv(webhook.VARIABLE, address)
    notify(failed.workspace)
    (warning,) = warnings(failed.workspace)
    assert told in warning
    assert never_told(failed.workspace)


def test_exit_handler_calls_the_webhook_after_the_page(
    failed: Any, listener: Any, tmp_path: Any
) -> None:
    told = listener(500)
    page = type("Page", (), {"path": str(tmp_path / "page.html")})()
    tracking = {"tracking": {"uri": "http://127.0.0.1:1"}}
    config = failed.config.model_copy(
        update={"tracking": failed.config.tracking.model_copy(update=tracking["tracking"])}
    )
    kfp_report(config=config.to_yaml(), overrides={}, job="", page=page)
    assert "failed in train" in (tmp_path / "page.html").read_text()
    assert [message["event"] for message in told] == ["failed"]
    assert any("it returned 500" in text for text in warnings(failed.workspace))
