"""The web application: which address shows which page, who may see it, and how it is served."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import wraps
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from typing import Final, get_args
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadytrain.components.shared import web_server
from steadytrain.components.shared.errors import BadInput, SteadytrainError
from steadytrain.components.shared.redaction import traceback_of
from steadytrain.components.shared.web_server import host_name
from steadytrain.pipelines.view import pages
from steadytrain.pipelines.view.library import MOST_RUNS, Library, Sort
from steadytrain.pipelines.view.pages import log_files, log_text, login_page, message_page
from steadytrain.pipelines.view.source import Source

_STATIC: Final = {
    "view.js": ("steadytrain.pipelines.view", "text/javascript"),
    "icon.svg": ("steadytrain.pipelines.view", "image/svg+xml"),
    "style.css": ("steadytrain.components.pages", "text/css"),
}
_ALIVE_SECONDS: Final = 15.0
"""How often a stream without news sends a line, so that nothing in between closes it."""

Page = Callable[[Request], str]


def application(source: Source, *, hosts: tuple[str, ...], token: str = "") -> Starlette:
    """Return the application. Set `state.closing` to end the streams of open pages.

    Args:
        hosts, token: as for Guard.
    """
    site = _Site(source)
    guard = Middleware(Guard, uri=source.uri, hosts=hosts, token=token)
    app = Starlette(
        routes=[
            Route("/", _html(source, site.list)),
            Route("/runs/{run}", _html(source, site.run)),
            Route("/runs/{run}/log", _html(source, site.log)),
            Route("/compare", _html(source, site.compare)),
            Route("/events", site.events),
            Route("/static/{name}", _static),
        ],
        middleware=[guard],
        exception_handlers={404: _not_found(source)},
    )
    app.state.closing = asyncio.Event()
    return app


class _Site:
    """The pages of a source. They run in threads, because they read files."""

    def __init__(self, source: Source) -> None:
        self.source, self.library = source, Library(source)

    def list(self, request: Request) -> str:
        given = request.query_params
        sort: Sort = next((one for one in get_args(Sort) if one == given.get("sort")), "active")
        words, asked = given.get("q", "").strip(), given.get("page", "")
        page = int(asked) if asked.isdecimal() and len(asked) < 9 else 1
        board = self.library.board
        result = board.rows(sort, words)
        last = max(1, -(-len(result) // pages.ROWS))
        page = min(max(1, page), last)
        rows = [board.row(run) for run in result[(page - 1) * pages.ROWS : page * pages.ROWS]]
        return pages.list_page(
            self.source.uri, rows, sort=sort, words=words, page=page, total=len(result)
        )

    def run(self, request: Request) -> str:
        opened = self.library.open(request.path_params["run"])
        logs = log_files(self.source, opened.row.run)
        return pages.run_page(self.source.uri, opened, logs)

    def log(self, request: Request) -> str:
        run = self.library.open(request.path_params["run"]).row.run
        name = request.query_params.get("file", "")
        text, is_cut = log_text(self.source, run, name)
        log = next(item for item in log_files(self.source, run) if item.name == name)
        return pages.log_page(self.source.uri, run, log, text, is_cut=is_cut)

    def compare(self, request: Request) -> str:
        runs = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(runs) <= MOST_RUNS:
            raise BadInput(
                f"{len(runs)} runs cannot be compared",
                remedy=f"select two to {MOST_RUNS} runs in the list",
            )
        return pages.compare_page(self.source.uri, [self.library.open(run) for run in runs])

    async def events(self, request: Request) -> StreamingResponse:
        """Send a line whenever the page that asks shows something new."""
        runs = request.query_params.getlist("run")
        closing: asyncio.Event = request.app.state.closing

        async def lines() -> AsyncIterator[str]:
            seen = await run_in_threadpool(news, self.library, runs)
            quiet = 0.0
            # The page may be older than what was seen just now.
            yield "retry: 2000\ndata: changed\n\n"
            while not await _is_set(closing, self.source.refresh_seconds):
                quiet += self.source.refresh_seconds
                version = await run_in_threadpool(news, self.library, runs)
                if version != seen:
                    seen, quiet = version, 0.0
                    yield "data: changed\n\n"
                elif quiet >= _ALIVE_SECONDS:
                    quiet = 0.0
                    yield ": alive\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")


def news(library: Library, runs: Sequence[str]) -> int | None:
    """Return the version of what a page shows; None while the storage fails, as its page says."""
    try:
        return library.version(runs)
    except SteadytrainError:
        return None


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, and return whether it came."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


def _html(source: Source, page: Page) -> Callable[[Request], Response]:
    """Return an endpoint that answers with a page, or with what is wrong."""

    @wraps(page)
    def answer(request: Request) -> Response:
        failure: SteadytrainError
        try:
            # A run's files may hold half a surrogate pair, which no page can.
            return HTMLResponse(page(request).encode("utf-8", "replace"))
        except BadInput as error:
            status, title, failure = 404, "Not found", error
        except SteadytrainError as error:
            status, title, failure = 502, "The runs cannot be read", error
        except Exception as error:
            print(traceback_of(error), end="", file=sys.stderr)
            status, title = 500, "This page cannot be shown"
            failure = SteadytrainError(
                f"its data led to an unexpected {type(error).__name__}",
                remedy="the terminal of `steadytrain ui` shows where; please report it",
            )
        return HTMLResponse(
            pages.message_page(source.uri, title, failure.message, failure.remedy), status
        )

    return answer


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        raise HTTPException(404)
    package, kind = _STATIC[name]
    return Response((resources.files(package) / name).read_bytes(), media_type=kind)


def _not_found(source: Source) -> Callable[[Request, Exception], Response]:
    text = pages.message_page(source.uri, "Not found", "There is no such page.")
    return lambda *_: HTMLResponse(text, 404)


TOKEN_VARIABLE: Final = "STEADYTRAIN_UI_TOKEN"


def serve(source: Source, listener: socket.socket, *, hosts: tuple[str, ...], token: str) -> None:
    """Serve until SIGINT or SIGTERM, which ends the streams of open pages."""
    app = application(source, hosts=hosts, token=token)
    web_server.serve(app, listener, stopping=app.state.closing.set, seconds=5)


COOKIE: Final = "steadytrain"
_LARGEST_FORM: Final = 4096
_OPEN_PATHS: Final = ("/login", "/static/")
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Guard:
    """Checks every request before a page sees it.

    Without the check of the Host header, a website could reach a server on this machine: its name
    only has to resolve to 127.0.0.1.

    Args:
        hosts: accepted names in the Host header, without a port; empty accepts every name.
        token: what the user has to give once; "" asks for none.
    """

    def __init__(self, app: ASGIApp, *, uri: str, hosts: tuple[str, ...], token: str) -> None:
        self.app, self.uri, self.hosts = app, uri, hosts
        self._token = token.encode()
        # The cookie holds no token: it is worth nothing once this process has ended.
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope, receive)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = await self._refusal(request)
        await (answer or self.app)(scope, receive, send_guarded)

    async def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that must not reach a page; None if it may."""
        # Not request.url: older versions of Starlette build it from the Host header as well, and a
        # Host of "NAME/static/?" then looks like an open path.
        path: str = request.scope["path"]
        if self.hosts and host_name(request.headers.get("host", "")) not in self.hosts:
            text = message_page(
                "",
                "Unknown host",
                "The address of this page has a name that the server does not answer to.",
                f"Open it as {self.hosts[0]}.",
            )
            return HTMLResponse(text, 421)
        if path == "/login" and self._token:
            return await self._login(request)
        if request.method not in ("GET", "HEAD"):
            return Response(status_code=405)
        if not self._token or path.startswith(_OPEN_PATHS) or self._is_known(request):
            return None
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return Response(status_code=401, headers={"www-authenticate": "Bearer"})

    async def _login(self, request: Request) -> Response:
        if request.method != "POST":
            return HTMLResponse(login_page(self.uri, failed=False))
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST_FORM:
                return Response(status_code=413)
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not hmac.compare_digest(given.encode(), self._token):
            return HTMLResponse(login_page(self.uri, failed=True), 403)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE,
            self._session,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    def _is_known(self, request: Request) -> bool:
        """Return whether a request has the session's cookie, or the token as a bearer."""
        cookie = _cookie(request.headers.get("cookie", ""))
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        has_token = kind.lower() == "bearer" and hmac.compare_digest(given.encode(), self._token)
        return has_token or hmac.compare_digest(cookie.encode(), self._session.encode())


def _cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""
