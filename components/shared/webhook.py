"""A small JSON to an address that is a secret: it comes from the environment and is never told."""

from __future__ import annotations

import json
import os
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

VARIABLE: Final = "STEADYTRAIN_WEBHOOK_URL"
SECONDS = 10.0
"""Longest time that a call takes, whatever the server does."""


def is_set() -> bool:
    """Whether there is somebody to call."""
    return bool(os.environ.get(VARIABLE))


def call(content: Mapping[str, str]) -> str:
    """Posts the content once. No redirect is followed, and no answer is read.

    Returns:
        "" where the server took it, else why not, in words that hold nothing of the address.
    """
    failures: list[str] = []
    arguments = os.environ.get(VARIABLE, ""), json.dumps(content).encode()
    # On a thread that can be left behind: the time-out of a socket starts anew with every byte.
    thread = threading.Thread(
        target=lambda: failures.append(_post(*arguments)), name="webhook", daemon=True
    )
    thread.start()
    thread.join(SECONDS)
    return failures[0] if failures else f"no answer within {SECONDS:g} s"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What stands at the other address was not configured, and may be inside the cluster."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_open = urllib.request.build_opener(_NoRedirects).open


def _post(address: str, body: bytes) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": "steadytrain"}
    try:
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            return "the address is none of http or https"
        with _open(urllib.request.Request(address, body, headers), timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        more = ": redirects are not followed" if 300 <= error.code < 400 else ""
        return f"it answered {error.code}{more}"
    except urllib.error.URLError as error:
        return _words(error.reason)
    except Exception as error:
        # Its text may hold the address, as would its traceback.
        return type(error).__name__


def _words(reason: object) -> str:
    """Why a connection failed, without any text that a server or a proxy had a part in."""
    if isinstance(reason, ssl.SSLError):
        return f"no secure connection ({getattr(reason, 'reason', type(reason).__name__)})"
    if isinstance(reason, OSError):
        return reason.strerror or type(reason).__name__
    return "the address is not valid"
