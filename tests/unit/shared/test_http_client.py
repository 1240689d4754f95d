"""Every client of a server ends in time, whatever the server does."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Callable, Iterator

import kfp_server_api
import pytest
import requests  # type: ignore[import-untyped]

from steadytrain.components.observe.otlp.exports import Collector
from steadytrain.components.shared import http_client
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.errors import ServerError, TrackingError
from steadytrain.components.shared.kubeflow.client import open_client
from steadytrain.components.shared.kubeflow.connection import connect
from steadytrain.components.shared.pagination import all_items, pages
from steadytrain.components.shared.retry import waiting
from steadytrain.components.shared.tracking.connect import import_mlflow, tracking_errors

from support.hostile_server import HEAD, Act, answering, dripping, flooding, saying
from support.ports import free_port

pytestmark = pytest.mark.timeout(300)  # a client that still waits then has no deadline


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import MLflow, which takes long, before a test has a short limit."""
    import_mlflow()


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MOST_BYTES", 1_000_000)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "SECONDS", 0.3)


def of_kubeflow(address: str) -> None:
    connect(address)


def of_mlflow(address: str) -> None:
    with tracking_errors(address):
        import_mlflow().MlflowClient(address).search_experiments()


def of_otlp(address: str) -> None:
    config = from_mapping(
        {
            "name": "small",
            "data": {"source": ["x"]},
            "model": {"config": {"model_type": "gpt2"}},
            "observability": {"otlp_endpoint": address},
        }
    )
    Collector(config).send_spans([])


HOSTILE = {
    "status line": dripping(b"HTTP/1.1 200 O"),
    "headers": dripping(HEAD + b"X-More: "),
    "body": dripping(HEAD + b"\r\n{"),
    "endless": flooding,
}


@pytest.mark.parametrize("act", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("client", [of_kubeflow, of_mlflow, of_otlp])
def test_every_client_ends_in_time(
    client: Callable[[str], None], act: Act, short_deadline: None
) -> None:
    with answering(act) as address, pytest.raises((ServerError, TrackingError)) as failed:
        client(address)
    assert str(failed.value.remedy)


def test_compressed_bomb_is_not_unpacked() -> None:
    bomb = saying(gzip.compress(b" " * 50_000_000), "200 OK", "Content-Encoding: gzip")
    with answering(bomb) as address, pytest.raises(http_client.LimitExceeded, match="compressed"):
        http_client.session().get(address)


def test_file_in_pieces_may_be_large() -> None:
    body = b"x" * 3_000_000
    with answering(saying(body)) as address:
        answer = http_client.session().get(address, stream=True)
        assert sum(map(len, answer.iter_content(65536))) == len(body)


def test_file_in_pieces_may_not_be_slow(short_deadline: None) -> None:
    def whole_head(connection: socket.socket, request: bytes) -> None:
        connection.sendall(HEAD + b"\r\n")
        dripping(b"", every=0.01)(connection, request)

    with answering(whole_head) as address, pytest.raises(http_client.TooSlow):
        list(http_client.session().get(address, stream=True).iter_content(1024))


def test_deadline_of_a_caller_is_kept() -> None:
    with answering(dripping(HEAD)) as address, pytest.raises(http_client.TooSlow):  # noqa: SIM117
        with http_client.deadline(0.3):
            http_client.session().get(address)


def test_server_cannot_send_its_clients_away_for_a_year() -> None:
    away = saying(b"{}", "503 Service Unavailable", "Retry-After: 31536000")
    with answering(away) as address, pytest.raises(ServerError, match="503"):
        connect(address)


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect"])
def test_redirect_of_a_collector_is_not_a_delivery(status: str) -> None:
    taken: list[bytes] = []

    def swallow(connection: object, request: bytes) -> None:
        taken.append(request)
        saying(b"{}")(connection, request)  # type: ignore[arg-type]

    with (
        answering(swallow) as other,
        answering(saying(b"", status, f"Location: {other}/x")) as address,
        pytest.raises(TrackingError, match="redirects"),
    ):
        of_otlp(address)
    assert taken == []


class Page:
    """A page of a list that has always one more."""

    def __init__(self) -> None:
        self.runs, self.token = [], f"{time.monotonic_ns()}"
        self.next_page_token = self.token

    def __iter__(self) -> Iterator[object]:
        return iter(self.runs)


def test_lists_without_an_end_are_errors() -> None:
    with pytest.raises(ServerError, match="never ends"):
        list(pages(lambda **_: Page(), "runs"))
    with pytest.raises(TrackingError, match="never ends"):
        list(all_items(lambda _: Page()))


@pytest.mark.parametrize("away", ["503 Service Unavailable", "nobody"])
def test_requests_wait_for_a_server_that_is_down(away: str) -> None:
    """Once it answers, the request succeeds, and the wait was reported once."""
    asked: list[float] = []

    def restarting(connection: object, request: bytes) -> None:
        asked.append(time.monotonic())
        if len(asked) > 2:
            saying(b"{}")(connection, request)  # type: ignore[arg-type]
        elif away != "nobody":
            saying(b"", away)(connection, request)  # type: ignore[arg-type]

    told: list[str] = []
    with answering(restarting) as address, waiting(300.0, told.append):
        assert http_client.session().post(address, data=b"x").status_code == 200
    assert len(told) == 1


def test_wait_for_a_server_has_an_end() -> None:
    with answering(saying(b"", "503 Service Unavailable")) as address, waiting(0.6):
        assert http_client.session().get(address).status_code == 503


def test_reason_of_a_wait_is_the_cause_alone() -> None:
    told: list[str] = []
    with waiting(0.1, told.append), pytest.raises(requests.ConnectionError):
        http_client.session().get(f"http://127.0.0.1:{free_port()}")
    assert told == ["Connection refused"]


def test_answer_that_is_no_run_is_an_error() -> None:
    with answering(saying(b"{}")) as address:
        client = open_client(address)
        with pytest.raises(ServerError, match="without run_id"):
            kfp_server_api.RunServiceApi(client).run_service_get_run("x")
