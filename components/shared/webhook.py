"""Post a small JSON object to a secret address.

The address comes from the environment and never appears in output.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Final
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
    # Use a thread that can be abandoned: the system may need long to resolve the host's name.
    thread = threading.Thread(
        target=lambda: failures.append(_post(*arguments)), name="webhook", daemon=True
    )
    thread.start()
    thread.join(SECONDS)
    return failures[0] if failures else f"no answer within {SECONDS:g} s"


def _post(address: str, body: bytes) -> str:
    from steadytrain.components.shared.http_client import deadline, session, why_absent

    headers = {"Content-Type": "application/json", "User-Agent": "steadytrain"}
    try:
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            return "the address is not http or https"
        if any(map(str.isspace, address)):
            return "InvalidURL"
        # Redirects are refused: nobody configured the other address, and it may be inside the
        # cluster.
        with (
            deadline(SECONDS),
            session() as opened,
            opened.post(
                address,
                body,
                headers=headers,
                timeout=SECONDS,
                allow_redirects=False,
                stream=True,
            ) as answer,
        ):
            status = answer.status_code
    except Exception as error:
        return type(error).__name__ if isinstance(error, ValueError) else why_absent(error)
    if 200 <= status < 300:
        return ""
    return f"it returned {status}{': redirects are not followed' if status < 400 else ''}"
