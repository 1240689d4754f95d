"""Read responses of an S3 server that may break off or differ from what S3 sends.

Gateways and caches drop headers, ignore `Range`, or page forever. Such responses raise an error and
are never used as content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.retry import Retry
from steadytrain.components.shared.storage.base import CHUNK_BYTES

EMPTY_PAGES = 100
"""Maximum number of consecutive empty pages of a listing. More count as endless."""


def stream(get: Callable[..., Mapping[str, Any]], place: str, retry: Retry) -> Iterator[bytes]:
    """Yield the content of an object in parts. If a response breaks off, request the rest.

    Args:
        get: requests the object; it takes further request parameters.
        place: the object's address, for messages.
        retry: how to retry requests that make no progress.

    Raises:
        StorageError: if the server sends anything other than the rest of the object.
    """
    from botocore.exceptions import HTTPClientError, IncompleteReadError

    answer = get()
    size, done = answer.get("ContentLength"), 0
    # Without a tag, a server cannot be asked for the rest of the same content.
    same = {"IfMatch": answer["ETag"]} if "ETag" in answer else {}
    while True:
        failure: Exception | None = None
        try:
            # Botocore does not retry a request if the response breaks off in its body.
            for part in answer["Body"].iter_chunks(CHUNK_BYTES):
                done += len(part)
                retry.reset()
                yield part
        except (HTTPClientError, IncompleteReadError) as error:
            failure = error
        if done == size or (size is None and failure is None):
            return
        if size is not None and done > size:
            raise _odd(place, f"{done} of the {size} bytes of an object")
        failure = failure or _odd(place, f"{done} of {size} bytes, and then nothing")
        if not retry.may_pass(failure):
            raise failure
        retry.pause()
        answer = get(Range=f"bytes={done}-", **same)
        check_range(answer, place, done)


def check_range(answer: Mapping[str, Any], place: str, start: int) -> None:
    """Check that a response holds the requested bytes from `start` on.

    Raises:
        StorageError: if it holds others.
    """
    if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
        raise _odd(place, f"something other than the requested bytes from {start} on (Range)")


def listed(pages: Iterable[Mapping[str, Any]], place: str) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a listing.

    Raises:
        StorageError: if it never ends, or lacks required fields.
    """
    found: dict[str, Mapping[str, Any]] = {}
    empty = 0
    try:
        for page in pages:
            before = len(found)
            found.update((item["Key"], item) for item in page.get("Contents", []))
            empty = 0 if len(found) > before else empty + 1
            if empty > EMPTY_PAGES:
                raise _odd(place, "an endless listing")
        for item in found.values():
            if missing := {"Size", "ETag", "LastModified"} - item.keys():
                raise _odd(place, f"a listing without {', '.join(sorted(missing))}")
    except ValueError as error:
        raise _odd(place, f"a listing that cannot be read: {error}") from error
    return list(found.values())


def _odd(place: str, what: str) -> StorageError:
    return StorageError(
        f"{place}: the server sent {what}",
        remedy="check that the server in AWS_ENDPOINT_URL, and any proxy or cache in front "
        "of it, behaves like S3",
    )
