"""A model as a web service: the same checks and answers as batch prediction, for small requests.

What waits is predicted together, in one thread.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import json
import re
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from steadytrain.components.predict.model import Input, ServedModel
from steadytrain.components.shared import web_server
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.web_server import host_name
from steadytrain.components.tasks.encoding.fields import STRICT_JSON, Defect

Answers = list[dict[str, Any] | Defect]
_WAITING_BATCHES: Final = 16
"""Batches of records that may wait. More are refused, since they would wait for too long."""


class Overloaded(Exception):
    """Too many records wait already."""


@dataclass
class _Request:
    values: Sequence[Any]
    answers: asyncio.Future[Answers]


class Batching:
    """Predicts for what waits, while the model is free, in order of arrival.

    A request never waits for others to come: those that arrive while the model works are the next
    batch. Requests stay whole, so one with more than `batch_size` records is a batch of its own.

    Args:
        batch_size: records per call of the model, if requests are smaller.
        seen: is called with the records and seconds of each batch.

    Attributes:
        waiting: number of records that wait for the model.
        busy_since: by time.monotonic, when the model began with a batch; None if it is free.
    """

    def __init__(
        self, model: ServedModel, batch_size: int, seen: Callable[[int, float], None]
    ) -> None:
        self._model, self._size, self._seen = model, batch_size, seen
        self._waiting = deque[_Request]()
        self._arrived = asyncio.Event()
        # One thread: few models may be called by two.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self.waiting = 0
        self.busy_since: float | None = None

    async def answer(self, values: Sequence[Any], seconds: float) -> Answers:
        """Return a prediction, or why there is none, for each value.

        Args:
            seconds: how long to wait.

        Raises:
            Overloaded: too many records wait already.
            TimeoutError: the time is over. Values that still wait are given up.
        """
        if self.waiting + len(values) > max(self._size * _WAITING_BATCHES, len(values)):
            raise Overloaded
        request = _Request(values, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.waiting += len(values)
        self._arrived.set()
        try:
            return await asyncio.wait_for(request.answers, seconds)
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
                self.waiting -= len(values)

    async def run(self) -> None:
        """Predict for ever. Cancel it to end it; a call of the model is not interrupted."""
        while True:
            await self._arrived.wait()
            if not self._waiting:
                self._arrived.clear()
                continue
            batch = self._next()
            values = [value for request in batch for value in request.values]
            started = self.busy_since = time.monotonic()
            results = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._model.answer_each, values
            )
            self.busy_since = None
            self._seen(len(values), time.monotonic() - started)
            for request in batch:
                # The forecasts of a history may be more or fewer than its records.
                count = len(results) if self._model.forecasts else len(request.values)
                answers, results = results[:count], results[count:]
                if not request.answers.done():
                    request.answers.set_result(answers)

    def _next(self) -> list[_Request]:
        batch = [self._waiting.popleft()]
        total = len(batch[0].values)
        # All records of a forecast are one history.
        while (
            not self._model.forecasts
            and self._waiting
            and total + len(self._waiting[0].values) <= self._size
        ):
            batch.append(self._waiting.popleft())
            total += len(batch[-1].values)
        self.waiting -= total
        return batch


TOKEN_VARIABLE: Final = "STEADYTRAIN_SERVE_TOKEN"
_OPEN_PATHS: Final = ("/health", "/ready", "/metrics")
"""What probes and Prometheus ask for, which have no token."""
_PREDICT: Final = "/predict"
_CHARSET: Final = re.compile(r"""\bcharset\s*=\s*["']?([^\s;"']+)""")
_DRAINED: Final = 1 << 26
"""Bytes of a body that is too large, which are read all the same: a client that finds the
connection closed while it sends reports that, and not the answer."""
_HEADERS: Final = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@dataclass(frozen=True)
class Limits:
    """What a request may cost.

    rows: records per request.
    bytes: of a request's body.
    record_bytes: of what the model reads of a record.
    seconds: from a request's first byte after its headers to its answer.
    batch_size: records per call of the model.
    """

    rows: int = 256
    bytes: int = 1_000_000
    record_bytes: int = 1_000_000
    seconds: float = 30.0
    batch_size: int = 64


class _Refusal(Exception):
    """Why a request has no predictions."""

    def __init__(self, status: int, error: str, fix: str, **more: Any) -> None:
        super().__init__(error)
        self.status, self.content = status, {"error": error, "fix": fix, **more}


class _Metrics:
    """What Prometheus reads. No value comes from a request."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "serve_requests", "Requests for predictions.", ["status"], registry=self.registry
        )
        self.records = Counter("serve_records", "Records predicted.", registry=self.registry)
        self.missing = Counter(
            "serve_missing_values",
            "Values that the model took for missing, by its column.",
            ["column"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "serve_request_seconds", "Time of a request.", registry=self.registry
        )
        self.batches = Histogram(
            "serve_batch_records",
            "Records per call of the model.",
            buckets=[2.0**power for power in range(11)],
            registry=self.registry,
        )
        self.model_seconds = Histogram(
            "serve_model_seconds", "Time of a call of the model.", registry=self.registry
        )
        self.waiting = Gauge(
            "serve_waiting_records", "Records that wait for the model.", registry=self.registry
        )

    def batch(self, records: int, seconds: float) -> None:
        self.batches.observe(records)
        self.model_seconds.observe(seconds)


def record_schema(inputs: Sequence[Input]) -> dict[str, Any]:
    """Return the JSON schema of a record."""
    kinds: Mapping[str, dict[str, Any]] = {
        "number": {"type": "number"},
        "text": {"type": "string"},
        "bytes": {"type": "string", "contentEncoding": "base64"},
    }
    columns: dict[str, Any] = {}
    for item in inputs:
        field = dict(kinds.get(item.kind, {}))
        if field and not item.required:
            field["type"] = [field["type"], "null"]
        columns[item.column] = field
    required = [item.column for item in inputs if item.required]
    return {"type": "object", "properties": columns, "required": required}


class _Service:
    """The answers to each address."""

    def __init__(self, model: ServedModel, limits: Limits) -> None:
        self.model, self.limits, self.metrics = model, limits, _Metrics()
        self.batching = Batching(model, limits.batch_size, self.metrics.batch)
        self.metrics.waiting.set_function(lambda: self.batching.waiting)
        self.stopping = threading.Event()

    def health(self) -> Response:
        return _json({"status": "ok"})

    def ready(self) -> Response:
        """Answer 503 while the service stops, or while the model hangs."""
        since = self.batching.busy_since
        if self.stopping.is_set():
            return _json({"status": "stopping"}, 503)
        if since is not None and time.monotonic() - since > self.limits.seconds:
            return _json(
                {"status": f"the model works for more than {self.limits.seconds:g} s"}, 503
            )
        return _json({"status": "ready", "model": self.model.address})

    def schema(self) -> Response:
        limits = self.limits
        return _json(
            {
                "model": self.model.address,
                "records": record_schema(self.model.inputs),
                "forecasts": self.model.forecasts,
                "limits": {
                    "rows": limits.rows,
                    "bytes": limits.bytes,
                    "record_bytes": limits.record_bytes,
                    "seconds": limits.seconds,
                },
            }
        )

    def show_metrics(self) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def predict(self, request: Request) -> Response:
        began = time.monotonic()
        try:
            content = await self._predicted(request, began + self.limits.seconds)
            answer = _json(content)
        except _Refusal as refusal:
            answer = _json(refusal.content, refusal.status)
            if refusal.status in (408, 413):
                # The rest of the body is not read.
                answer.headers["connection"] = "close"
            if refusal.status == 503:
                answer.headers["retry-after"] = "1"
        self.metrics.requests.labels(str(answer.status_code)).inc()
        self.metrics.seconds.observe(time.monotonic() - began)
        return answer

    async def _predicted(self, request: Request, deadline: float) -> dict[str, Any]:
        _check_form(request.headers)
        try:
            body = await asyncio.wait_for(self._body(request), deadline - time.monotonic())
        except TimeoutError:
            raise _Refusal(
                408, f"the body did not arrive in {self.limits.seconds:g} s", "send it faster"
            ) from None
        rows = self._rows(body)
        values, unread = self._values(rows)
        try:
            answers = await self.batching.answer(values, max(0.0, deadline - time.monotonic()))
        except Overloaded:
            raise _Refusal(503, "too many records wait for the model", "try again later") from None
        except TimeoutError:
            raise _Refusal(
                504,
                f"no answer within {self.limits.seconds:g} s",
                "send fewer records, or ask whoever runs the service to raise --timeout",
            ) from None
        _check([(index, item) for index, item in enumerate(answers) if isinstance(item, Defect)])
        self.metrics.records.inc(len(values))
        missing = self.model.taken_for_missing(values)
        for column, count in missing.items():
            self.metrics.missing.labels(column).inc(count)
        return {
            "model": self.model.address,
            "predictions": answers,
            "missing": missing,
            **({"filled": self.model.filled_times(values)} if self.model.forecasts else {}),
            "unread": unread,
        }

    async def _body(self, request: Request) -> bytes:
        most, size, body = self.limits.bytes, 0, bytearray()
        declared = int(request.headers.get("content-length", "0"))
        large = _Refusal(413, f"the body has more than {most:,} bytes", "send fewer records")
        # A client that waits for the word to send, or would send for long, is answered at once.
        if declared > most and ("expect" in request.headers or declared > most + _DRAINED):
            raise large
        try:
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    body += part
                elif size > most + _DRAINED:
                    break
        except ClientDisconnect:
            raise _Refusal(400, "the connection ended within the body", "send all of it") from None
        if size > most:
            raise large
        return bytes(body)

    def _rows(self, body: bytes) -> list[Any]:
        form = 'send {"records": [{"COLUMN": VALUE, ...}, ...]}; /schema shows the columns'
        try:
            content = STRICT_JSON.decode(body.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _Refusal(400, f"the body is not JSON: {str(error)[:200]}", form) from None
        if isinstance(content, Defect):
            raise _Refusal(400, content.detail, form)
        if not isinstance(content, dict) or content.keys() != {"records"}:
            raise _Refusal(400, "the body is not an object with the one field records", form)
        rows = content["records"]
        if not isinstance(rows, list) or not rows:
            raise _Refusal(400, "records is not a list with at least one record", form)
        if len(rows) > self.limits.rows:
            raise _Refusal(
                413,
                f"{len(rows):,} records, more than {self.limits.rows:,}",
                "send several requests, or use steadytrain predict for a whole file",
            )
        return rows

    def _values(self, rows: Sequence[Any]) -> tuple[list[Any], list[str]]:
        """Return what the model takes of the records, and the columns that it does not read.

        Raises:
            _Refusal: the model cannot take some of them, or a column is in none.
        """
        read = {item.column for item in self.model.inputs}
        seen, unread = set[str](), set[str]()
        values, refused = list[Any](), list[tuple[int, Defect]]()
        for index, row in enumerate(rows):
            try:
                if isinstance(row, Defect):
                    raise row
                if not isinstance(row, dict):
                    raise Defect("wrong_type", f"the record is {type(row).__name__}, not an object")
                seen.update(row.keys() & read)
                unread.update(row.keys() - read)
                values.append(self.model.checked(self._with_files(row), self.limits.record_bytes))
            except Defect as defect:
                refused.append((index, defect))
        _check(refused)
        column, problem = self.model.without_column(seen, unread)
        if problem:
            raise _Refusal(422, problem, f"add {column}, null if it is unknown")
        return values, sorted(unread)

    def _with_files(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record whose files are bytes.

        Raises:
            Defect: one is not base64.
        """
        files = [item.column for item in self.model.inputs if item.kind == "bytes"]
        result = dict(row)
        for column in files:
            if isinstance(result.get(column), str):
                try:
                    result[column] = base64.b64decode(result[column], validate=True)
                except (binascii.Error, ValueError):
                    raise Defect(
                        "wrong_type", f"{column} is not a file's content in base64"
                    ) from None
        return result


def _check_form(headers: Mapping[str, str]) -> None:
    """Raise _Refusal unless a body is plain JSON in UTF-8 by its headers."""
    kind, _, parameters = headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json":
        raise _Refusal(
            415, f"the body is {kind.strip()[:80] or 'of no type'}", "send application/json"
        )
    charset = _CHARSET.search(parameters)
    if charset and charset[1] not in ("utf-8", "utf8", "us-ascii"):
        raise _Refusal(415, f"the body has the charset {charset[1][:80]}", "send UTF-8")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise _Refusal(
            415, f"the body has the content-encoding {encoding[:80]}", "send it without one"
        )


def _check(refused: Sequence[tuple[int, Defect]]) -> None:
    """Raise _Refusal if there are records without a prediction, with the reason of each."""
    if refused:
        index, first = refused[0]
        raise _Refusal(
            422,
            f"{len(refused):,} records cannot be predicted; record {index}: {first.detail}",
            "fix or leave out the records in `refused`, which counts from 0",
            refused=[
                {"record": index, "reason": defect.reason, "detail": defect.detail}
                for index, defect in refused
            ],
        )


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    # In ASCII: a text from a request may hold half a surrogate pair.
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")


def application(
    model: ServedModel,
    limits: Limits,
    *,
    hosts: Sequence[str] = (),
    token: str = "",
    origins: Sequence[str] = (),
) -> FastAPI:
    """Return the web application of a model.

    Args:
        hosts: accepted names in the Host header, without a port; empty accepts every name.
        token: what a caller gives as a bearer; "" asks for none.
        origins: of the web pages whose scripts may call the service.
    """
    service = _Service(model, limits)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        working = asyncio.create_task(service.batching.run())
        try:
            yield
        finally:
            working.cancel()

    # No pages of documentation: their scripts come from other hosts.
    app = FastAPI(title=model.address, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.get("/health")(service.health)
    app.get("/ready")(service.ready)
    app.get("/schema")(service.schema)
    app.get("/metrics")(service.show_metrics)
    body = {
        "type": "object",
        "required": ["records"],
        "properties": {
            "records": {
                "type": "array",
                "minItems": 1,
                "maxItems": limits.rows,
                "items": record_schema(model.inputs),
            }
        },
    }
    described = {"requestBody": {"content": {"application/json": {"schema": body}}}}
    app.post(_PREDICT, openapi_extra=described)(service.predict)

    @app.exception_handler(HTTPException)
    async def _(_: Request, error: HTTPException) -> Response:
        text = f"{error.detail}: {', '.join(('/schema', _PREDICT, *_OPEN_PATHS))}"
        return _json({"error": text, "fix": "GET /schema shows what to send"}, error.status_code)

    @app.middleware("http")
    async def _(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        answer = _turned_away(request, hosts, token) or await go_on(request)
        answer.headers.update(_HEADERS)
        return answer

    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app


def _turned_away(request: Request, hosts: Sequence[str], token: str) -> Response | None:
    """Return the answer to a request of one who may not ask; None if anyone may."""
    if hosts and host_name(request.headers.get("host", "")) not in hosts:
        text = "the Host header has a name that the service does not answer to"
        return _json({"error": text, "fix": f"call it as {hosts[0]}"}, 421)
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    known = kind.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())
    if token and request.scope["path"] not in _OPEN_PATHS and not known:
        fix = f"send the header authorization: Bearer TOKEN, as {TOKEN_VARIABLE} has it"
        answer = _json({"error": "the token is missing or wrong", "fix": fix}, 401)
        answer.headers["www-authenticate"] = "Bearer"
        return answer
    return None


def check_origin(origin: str) -> None:
    """Reject what a browser never sends as an origin.

    Raises:
        BadInput: it is not SCHEME://HOST or SCHEME://HOST:PORT.
    """
    try:
        parts = urlsplit(origin)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or f"{parts.scheme}://{parts.netloc}" != origin or "@" in origin:
        raise BadInput(
            f"--cors-origin {origin}: it is not the origin of a web page",
            remedy="give scheme, host and port as the browser shows them, such as "
            "https://app.example.com, without a path",
        )


def serve(app: FastAPI, listener: socket.socket, limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM, from which on it is no longer ready."""
    service: _Service = app.state.service
    web_server.serve(app, listener, stopping=service.stopping.set, seconds=limits.seconds)
