"""Who may see the pages: the Host header, the token, and the headers that every answer has."""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from steadytrain.pipelines.view.pages import login_page, message_page

COOKIE: Final = "steadytrain"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
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
        if self.hosts and _name(request.headers.get("host", "")) not in self.hosts:
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


def _name(host: str) -> str:
    """Return the name in a Host header, without its port and without the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _cookie(header: str) -> str:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
