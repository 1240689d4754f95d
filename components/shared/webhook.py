"""A small JSON to an address that is a secret: it comes from the environment and is never told."""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Final

VARIABLE: Final = "STEADYTRAIN_WEBHOOK_URL"
SECONDS = 10.0
"""Longest time that a call takes, whatever the server does."""


def is_set() -> bool:
    """Whether there is somebody to call."""
    return bool(os.environ.get(VARIABLE))


def call(content: Mapping[str, str]) -> str:
    """Posts the content once.

    Returns:
        "" where the server took it, else why not, in words that hold nothing of the address.
    """
    address = os.environ.get(VARIABLE, "")
    if not address.startswith(("http://", "https://")):
        return "the address is none of http or https"
    failures: list[str] = []
    # On a thread that can be left behind: the time-out of a socket starts anew with every byte.
    thread = threading.Thread(
        target=lambda: failures.append(_post(address, json.dumps(content).encode())),
        name="webhook",
        daemon=True,
    )
    thread.start()
    thread.join(SECONDS)
    return failures[0] if failures else f"no answer within {SECONDS:g} s"


def _post(address: str, body: bytes) -> str:
    try:
        request = urllib.request.Request(
            address, body, {"Content-Type": "application/json", "User-Agent": "steadytrain"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason
        return str(reason.strerror if isinstance(reason, OSError) else "the address is not valid")
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Its text may hold the address.
        return type(error).__name__
