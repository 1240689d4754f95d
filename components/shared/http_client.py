"""The one HTTP client: every request has a deadline for all of it, and every answer a largest size.

urllib3's timeouts start again with each byte. A server that sends one byte a second, or never stops
sending, would keep its client for ever. The limits are in the connections of urllib3, which also
carries the requests of MLflow, OpenTelemetry, Kubeflow Pipelines and Kubernetes. Only the
resolution of a host's name has no limit here; the system's resolver has its own.
"""

from __future__ import annotations

import http.client
import io
import math
import socket
import ssl
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import requests  # type: ignore[import-untyped]
import urllib3
from requests.adapters import HTTPAdapter  # type: ignore[import-untyped]
from requests.utils import rewind_body  # type: ignore[import-untyped]
from urllib3.connection import HTTPConnection, HTTPSConnection

from steadytrain.components.shared.errors import TrackingError
from steadytrain.components.shared.quantities import size
from steadytrain.components.shared.retry import request_context, requests_with

SECONDS: Final = 120.0
"""Longest time for a request with its retries and its whole answer."""
SLOWEST: Final = 100_000
"""Bytes a second. A file that is sent, or received piece by piece, gets more time at this rate."""
MOST_BYTES: Final = 64_000_000
"""Largest answer that is kept in memory. Files that are received piece by piece have no limit."""
UNAVAILABLE: Final = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses of a server that may be back in a moment: those after which MLflow's own client sends a
request again. 500 is one of them: MLflow's server answers it for every error of its database that
it does not know."""


class LimitExceeded(Exception):
    """A server took too long for an answer, or its answer is too large.

    passing: whether another request may succeed.
    """

    passing = False


class TooSlow(LimitExceeded):
    """The answer was not complete in time."""

    passing = True


def deadline(seconds: float) -> AbstractContextManager[None]:
    """End every request of this thread that is not done within `seconds` from now with TooSlow."""
    return requests_with(until=min(request_context().until, time.monotonic() + seconds))


class Limits:
    """The limits of one request.

    until: its end, on the monotonic clock.
    in_pieces: as in `RequestContext`.
    late: the error if it is not done by then.
    """

    def __init__(self, until: float, in_pieces: bool, late: type[Exception] = TooSlow) -> None:
        self.until, self.in_pieces, self.late = until, in_pieces, late
        self._received, self._read = 0, math.inf

    def left(self) -> float:
        """Return the remaining seconds. Raises `late` if there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise self.late("the server did not give a complete answer in time")
        return left

    def resume(self) -> None:
        """Before a read, allow the time in which the reader did something else with a piece."""
        if self.in_pieces:
            self.until += max(0.0, time.monotonic() - self._read)

    def grant(self, count: int) -> None:
        """Allow the time that this many bytes take."""
        self.until += count / SLOWEST

    def receive(self, count: int) -> None:
        """Count received bytes. Raises LimitExceeded if there are too many."""
        self._read = time.monotonic()
        if self.in_pieces:
            self.grant(count)
            return
        self._received += count
        if self._received > MOST_BYTES:
            raise LimitExceeded(f"the server's answer is larger than {size(MOST_BYTES)}")

    def timeout(self, each: float | None) -> float | None:
        """Return the timeout of the next operation, whose own is `each`."""
        left = self.left()
        if math.isinf(left):
            return each
        return left if each is None else min(each, left)


class _Received(io.RawIOBase):
    """The bytes from a socket, within limits."""

    def __init__(self, raw: io.RawIOBase, sock: socket.socket, limits: Limits) -> None:
        self._raw, self._socket, self._limits = raw, sock, limits
        self._each = sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._limits.resume()
        self._socket.settimeout(self._limits.timeout(self._each))
        try:
            count: int | None = self._raw.readinto(buffer)
        except TimeoutError:
            self._limits.left()
            raise
        self._limits.receive(count or 0)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class Answer(http.client.HTTPResponse):
    """An answer within limits."""

    def __init__(self, limits: Limits, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._limits = limits
        self.fp = io.BufferedReader(_Received(self.fp.detach(), sock, limits))

    def begin(self) -> None:
        super().begin()
        # A few received bytes may unpack to any size.
        packed = self.headers.get("Content-Encoding", "identity").lower() != "identity"
        if packed and not self._limits.in_pieces:
            raise LimitExceeded("the server's answer is compressed, which nobody asked for")


class Limited:
    """A connection of urllib3 whose requests have limits."""

    timeout: float | None
    sock: socket.socket | None
    response_class: Any

    def _begin(self) -> None:
        context = request_context()
        self._limits = Limits(context.until, context.in_pieces)
        self.response_class = partial(Answer, self._limits)

    def connect(self) -> None:
        self._begin()
        self.timeout = self._limits.timeout(self.timeout)
        super().connect()  # type: ignore[misc]

    def request(self, *args: Any, **options: Any) -> None:
        self._begin()
        self._limits.left()
        super().request(*args, **options)  # type: ignore[misc]

    def send(self, data: Any) -> None:
        if self.sock is not None:
            self._limits.grant(len(data) if isinstance(data, bytes | bytearray) else 0)
            self.sock.settimeout(self._limits.timeout(self.timeout))
        try:
            super().send(data)  # type: ignore[misc]
        except TimeoutError:
            self._limits.left()
            raise


class _Plain(Limited, HTTPConnection):
    pass


class _Secure(Limited, HTTPSConnection):
    pass


class _Timed:
    """A pool of connections whose requests, with all their retries, share one deadline."""

    def urlopen(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: Any = None,
        retries: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        retries = self.retries if retries is None else retries  # type: ignore[attr-defined]
        if request_context().once:
            retries = urllib3.Retry(0)
        if isinstance(retries, urllib3.Retry):
            # A server may ask its clients to come back in a year. Its last answer says more than
            # an exception about too many answers.
            retries = retries.new(respect_retry_after_header=False, raise_on_status=False)
        with deadline(SECONDS):
            return super().urlopen(  # type: ignore[misc]
                method, url, body, headers, retries, *args, **options
            )


class _PlainPool(_Timed, urllib3.HTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Plain


class _SecurePool(_Timed, urllib3.HTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Secure


def limit(manager: urllib3.PoolManager) -> None:
    """Give the requests of a new pool manager their limits."""
    manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}


class LimitedAdapter(HTTPAdapter):  # type: ignore[misc]  # it carries no types
    """The connections of a session of `requests`, with limits.

    Where `waiting` says so, a request waits for a server that is down. Its own retries, which
    report nothing, are then left out.
    """

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        limit(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*args, **options)
        limit(manager)
        return manager

    def send(
        self, request: requests.PreparedRequest, stream: bool = False, *args: Any, **options: Any
    ) -> requests.Response:
        if not stream:
            request.headers["Accept-Encoding"] = "identity"
        retry, lost = request_context().retry, False
        while True:
            try:
                answer = self._send(request, stream, *args, **options)
                if retry is None or answer.status_code not in UNAVAILABLE:
                    break
                if not retry.may_pass(_away(f"it answers {answer.status_code}")):
                    break
                answer.close()
            except Exception as error:
                if retry is None or not (
                    is_absence(error) and retry.may_pass(_away(why_absent(error)))
                ):
                    raise
                lost = True
            retry.pause()
            if getattr(request, "_body_position", None) is not None:
                rewind_body(request)
        if retry is not None and answer.status_code not in UNAVAILABLE:
            retry.reset()
        if lost and self.repeats(answer):
            answer.status_code, answer._content = 200, b"{}"
        return answer

    def repeats(self, answer: requests.Response) -> bool:  # noqa: ARG002  for subclasses
        """Return whether an error says that the server did this before, but its answer was lost."""
        return False

    def _send(
        self, request: requests.PreparedRequest, stream: bool, *args: Any, **options: Any
    ) -> requests.Response:
        once = request_context().retry is not None
        with requests_with(in_pieces=stream, once=once), deadline(SECONDS):
            answer = super().send(request, stream, *args, **options)
            if not stream:
                _ = answer.content
            return answer


def _away(why: str) -> TrackingError:
    return TrackingError(why, passing=True)


def is_absence(error: BaseException) -> bool:
    """Return whether an error says that a server cannot be reached now, or did not answer."""
    if isinstance(error, requests.exceptions.SSLError | requests.exceptions.InvalidURL):
        return False
    kinds = requests.ConnectionError, requests.Timeout, requests.exceptions.RetryError
    return isinstance(error, kinds) or (isinstance(error, LimitExceeded) and error.passing)


def why_absent(error: BaseException) -> str:
    """Say in a few words why a server gave no answer, without text of a server or an address."""
    causes = [error]
    while (cause := _cause(causes[-1])) is not None and cause not in causes:
        causes.append(cause)
    for cause in reversed(causes):
        if isinstance(cause, ssl.SSLError):
            return f"no secure connection ({getattr(cause, 'reason', type(cause).__name__)})"
        if isinstance(cause, LimitExceeded):
            return str(cause)
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        if isinstance(cause, TimeoutError | urllib3.exceptions.TimeoutError):
            return "no answer in time"
        if isinstance(cause, http.client.RemoteDisconnected | http.client.IncompleteRead):
            return "it closed the connection"
    return type(causes[-1]).__name__


def _cause(error: BaseException) -> BaseException | None:
    """Return what led to an error. requests and urllib3 wrap the first one several times."""
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return reason
    wrapped = next((item for item in error.args if isinstance(item, BaseException)), None)
    return wrapped or error.__cause__ or error.__context__


def session() -> requests.Session:
    """Return a session whose requests have limits, and follow no redirects by themselves."""
    made = requests.Session()
    for scheme in ("http://", "https://"):
        made.mount(scheme, LimitedAdapter())
    return made
