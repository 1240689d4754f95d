"""Post a small JSON object to a secret address.

The address comes from the environment and never appears in output.
"""

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
"""The longest time a call may take, whatever the server does."""


def is_set() -> bool:
    """Return whether a webhook is configured."""
    return bool(os.environ.get(VARIABLE))


def call(content: Mapping[str, str]) -> str:
    """Post the content once. Don't follow redirects or read the answer.

    Returns:
        "" if the server accepted it, or else the reason, without any part of the address.
    """
    failures: list[str] = []
    arguments = os.environ.get(VARIABLE, ""), json.dumps(content).encode()
    # Use a thread that can be abandoned: a socket's timeout starts again with every byte.
    thread = threading.Thread(
        target=lambda: failures.append(_post(*arguments)), name="webhook", daemon=True
    )
    thread.start()
    thread.join(SECONDS)
    return failures[0] if failures else f"no answer within {SECONDS:g} s"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects: nobody configured the other address, and it may be inside the cluster."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_open = urllib.request.build_opener(_NoRedirects).open


def _post(address: str, body: bytes) -> str:
    headers = {"Content-Type": "application/json", "User-Agent": "steadytrain"}
    try:
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            return "the address is not http or https"
        with _open(urllib.request.Request(address, body, headers), timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        error.close()
        more = ": redirects are not followed" if 300 <= error.code < 400 else ""
        return f"it returned {error.code}{more}"
    except urllib.error.URLError as error:
        return _words(error.reason)
    except Exception as error:
        # The error's text or traceback may contain the address.
        return type(error).__name__


def _words(reason: object) -> str:
    """Say why a connection failed, without any text from a server or a proxy."""
    if isinstance(reason, ssl.SSLError):
        return f"no secure connection ({getattr(reason, 'reason', type(reason).__name__)})"
    if isinstance(reason, OSError):
        return reason.strerror or type(reason).__name__
    return "the address is not valid"
