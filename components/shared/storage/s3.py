"""Storage in an S3 bucket, through boto3. Credentials come from boto3's own chain.

botocore retries requests that fail temporarily (500, SlowDown, timeouts, connection resets), with
growing waits. This module handles two cases that botocore does not: bodies that break off, and
conditional writes whose response is lost.
"""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.retry import FOREVER, Retry, any_error
from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer, Stream, Weight
from steadytrain.components.shared.storage.local import local_errors, sync_file, sync_folder

if TYPE_CHECKING:
    from boto3.s3.transfer import TransferConfig
    from botocore.loaders import Loader
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import MultipartUploadTypeDef


EMPTY_PAGES = 100
"""Maximum number of consecutive empty pages of a listing. More count as endless."""


def stream(get: Callable[..., Mapping[str, Any]], address: str, retry: Retry) -> Iterator[bytes]:
    """Yield the content of an object in parts. If a response breaks off, request the rest.

    Args:
        get: requests the object; it takes further request parameters.
        address: the object's address, for messages.
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
            raise _odd(address, f"{done} of the {size} bytes of an object")
        failure = failure or _odd(address, f"{done} of {size} bytes, and then nothing")
        if not retry.may_pass(failure):
            raise failure
        retry.pause()
        answer = get(Range=f"bytes={done}-", **same)
        check_range(answer, address, done)


def check_range(answer: Mapping[str, Any], address: str, start: int) -> None:
    """Check that a response holds the requested bytes from `start` on.

    Raises:
        StorageError: if it holds others.
    """
    if not str(answer.get("ContentRange", "")).startswith(f"bytes {start}-"):
        raise _odd(address, f"something other than the requested bytes from {start} on (Range)")


def listed(pages: Iterable[Mapping[str, Any]], address: str) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a listing.

    Raises:
        StorageError: if it never ends, or lacks required fields.
    """
    objects: dict[str, Mapping[str, Any]] = {}
    empty = 0
    try:
        for page in pages:
            before = len(objects)
            objects.update((item["Key"], item) for item in page.get("Contents", []))
            empty = 0 if len(objects) > before else empty + 1
            if empty > EMPTY_PAGES:
                raise _odd(address, "an endless listing")
        for item in objects.values():
            if missing := {"Size", "ETag", "LastModified"} - item.keys():
                raise _odd(address, f"a listing without {', '.join(sorted(missing))}")
    except ValueError as error:
        raise _odd(address, f"a listing that cannot be read: {error}") from error
    return list(objects.values())


def _odd(address: str, what: str) -> StorageError:
    return StorageError(
        f"{address}: the server sent {what}",
        remedy="check that the server in AWS_ENDPOINT_URL, and any proxy or cache in front "
        "of it, behaves like S3",
    )


CONNECT_SECONDS, READ_SECONDS = 10.0, 30.0
"""Longest wait for a connection, and for the next byte of a response. The whole response has the
deadline of `http_client`."""
ATTEMPTS = 6
"""Attempts per request, including the first. Also applies to a body that breaks off."""

PARTS = 9_000
"""Maximum number of parts of an object. S3 allows 10,000; the rest is a reserve for inexact
sizes."""
LARGEST_PART = 5 << 30
"""S3's own limit."""
READ_AHEAD_BYTES = 512 << 20

_WRITER = "steadytrain-writer"
_ALWAYS = {
    "ListObjectsV2": "IsTruncated",
    "PutObject": "ETag",
    "CreateMultipartUpload": "UploadId",
    "UploadPart": "ETag",
    "CompleteMultipartUpload": "ETag",
}
"""What the answer to a request has from every server that behaves like S3. Some servers send an
object without its tag."""
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"PreconditionFailed", "412"}
_CONTENDED = {"ConditionalRequestConflict", "409"}
_BUSY = {"500", "503", "InternalError", "ServiceUnavailable", "SlowDown"}
_REFUSED = {
    "401",
    "403",
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}


@dataclass(frozen=True)
class ObjectInfo:
    """An object as a listing describes it.

    tag: changes with the content.
    written: when it was written, in seconds since the epoch.
    """

    name: str
    size: int
    tag: str
    written: float


class S3Storage:
    """Objects below s3://bucket/prefix."""

    _conditional: ClassVar[set[tuple[str, str]]] = set()

    def __init__(self, uri: str, client: S3Client | None = None) -> None:
        # Not urlsplit: in a key, `?` and `#` are ordinary characters.
        self.bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not self.bucket:
            raise BadInput(f"address {uri!r} names no bucket", remedy="s3://BUCKET/PREFIX")
        self.prefix = prefix.strip("/")
        if client is not None:
            self.client = client

    @cached_property
    def client(self) -> S3Client:
        import boto3
        import botocore.session
        from botocore.config import Config

        from steadytrain.components.shared.storage.s3_connections import limit

        # Use a separate session: threads must not share boto3's default session.
        core = botocore.session.get_session()
        session = boto3.session.Session(botocore_session=core)
        core.register_component("data_loader", _descriptions())
        bucket = f"s3://{self.bucket}"
        core.register("before-parse.s3", partial(_check_times, bucket))
        core.register("after-call.s3", partial(_check_answer, bucket))
        core.register("needs-retry.s3.HeadBucket", partial(_check_redirect, bucket))
        client = session.client(
            "s3",
            config=Config(
                retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
            ),
        )
        limit(client)
        return client

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, name: str) -> bytes:
        return b"".join(self.read_stream(name))

    def write(self, name: str, content: bytes, *, if_absent: bool = False) -> bool:
        with self._named(name):
            if if_absent:
                return self._write_first(name, content)
            self.client.put_object(Bucket=self.bucket, Key=self._key(name), Body=content)
            return True

    def write_stream(self, name: str, parts: Iterable[Buffer], *, size: int = 0) -> None:
        """Write as the protocol describes. The server checks each part against its SHA-256."""
        with self._named(name):
            self.client.upload_fileobj(
                io.BufferedReader(Stream(parts), CHUNK_BYTES),
                self.bucket,
                self._key(name),
                {"ChecksumAlgorithm": "SHA256"},
                Config=_transfer(size),
            )

    def read_stream(self, name: str) -> Iterator[bytes]:
        get = partial(self.client.get_object, Bucket=self.bucket, Key=self._key(name))
        with self._named(name):
            yield from stream(get, f"{self.uri}/{name}", _retry(any_error))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return bytes `start` to `end` of an object, or what there is of them.

        Raises:
            FileNotFoundError: if the object does not exist.
            StorageError: if the read fails, or the server sends other bytes.
        """
        with self._named(name):
            answer = self.client.get_object(
                Bucket=self.bucket, Key=self._key(name), Range=f"bytes={start}-{end - 1}"
            )
            check_range(answer, f"{self.uri}/{name}", start)
            return answer["Body"].read()

    def exists(self, name: str) -> bool:
        try:
            with self._named(name):
                self.client.head_object(Bucket=self.bucket, Key=self._key(name))
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        return [item.name for item in self.describe(prefix)]

    def sizes(self) -> Mapping[str, int]:
        return {item.name: item.size for item in self.describe()}

    def describe(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """Return the objects that `list` finds, with size and entity tag."""
        with self._named(prefix):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._key(prefix)
            )
            result = listed(pages, f"{self.uri}/{prefix}")
        objects = (
            ObjectInfo(
                item["Key"][self._cut :],
                item["Size"],
                item["ETag"],
                item["LastModified"].timestamp(),
            )
            for item in result
            # Skip entries for folders, and keys outside the requested prefix.
            if item["Key"].startswith(self._key(prefix)) and not item["Key"].endswith("/")
        )
        return sorted(objects, key=lambda item: item.name)

    def weigh(self, folder: str = "") -> Weight:
        objects = self.describe(f"{folder}/" if folder else "")
        return Weight(
            sum(item.size for item in objects), max((item.written for item in objects), default=0.0)
        )

    def delete(self, name: str) -> None:
        with self._named(name):
            self.client.delete_object(Bucket=self.bucket, Key=self._key(name))

    def folders(self) -> Sequence[str]:
        unfinished = [upload["Key"][self._cut :] for upload in self._uploads("")]
        return sorted(
            {name.partition("/")[0] for name in [*self.list(), *unfinished] if "/" in name}
        )

    def clear(self, folder: str) -> None:
        for name in self.list(f"{folder}/"):
            self.delete(name)
        self.drop_unfinished(folder)

    def drop_unfinished(self, name: str) -> None:
        """Remove what killed multipart uploads have left of an object, or of those in a folder."""
        key = self._key(name)
        for upload in self._uploads(name):
            if upload["Key"] != key and not upload["Key"].startswith(f"{key}/"):
                continue
            with self._named(name):
                self.client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def _uploads(self, prefix: str) -> Sequence[MultipartUploadTypeDef]:
        """Return the multipart uploads that were started but not completed."""
        with self._named(prefix):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self._key(prefix)
            )
            return [item for page in pages for item in page.get("Uploads", [])]

    @property
    def _cut(self) -> int:
        """Length of the part of a key before the object's name."""
        return len(self.prefix) + 1 if self.prefix else 0

    def download(self, name: str, path: Path) -> None:
        partial = path.with_name(f".partial-{uuid.uuid4().hex}")
        with local_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with self._named(name):
                    self.client.download_file(self.bucket, self._key(name), str(partial))
                sync_file(partial)
                partial.replace(path)
                sync_folder(path.parent)
            finally:
                partial.unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> None:
        with self._named(name):
            self.client.upload_file(str(path), self.bucket, self._key(name))

    def sub(self, prefix: str) -> S3Storage:
        return S3Storage(f"s3://{self.bucket}/{self._key(prefix)}", self.client)

    def require_conditional_writes(self) -> None:
        bucket = (self.client.meta.endpoint_url, self.bucket)
        if bucket in self._conditional:
            return
        name = f".probe-{uuid.uuid4().hex}"
        try:
            held = self.write(name, b"", if_absent=True)
            held = held and not self.write(name, b"", if_absent=True)
        except StorageError as error:
            if not any(code in error.message for code in ("NotImplemented", "501")):
                raise
            held = False
        with contextlib.suppress(StorageError):
            self.delete(name)
        if not held:
            raise BadInput(
                f"the server of s3://{self.bucket} does not support conditional writes "
                "(If-None-Match), which keep two processes from doing the same work",
                remedy="use a server that does (Amazon S3, and current MinIO, Ceph or SeaweedFS), "
                "or a shared folder",
            )
        self._conditional.add(bucket)

    def _write_first(self, name: str, content: bytes) -> bool:
        """Write an object if it does not exist.

        If the response to a request is lost, the retry is rejected because the object already
        exists. The writer's mark on the object shows whose it is.
        """
        from botocore.exceptions import ClientError

        mark = uuid.uuid4().hex
        put = partial(
            self.client.put_object,
            Bucket=self.bucket,
            Key=self._key(name),
            Body=content,
            IfNoneMatch="*",
            Metadata={_WRITER: mark},
        )
        try:
            # Another write is in progress and may still fail. S3 asks clients to retry.
            _retry(lambda error: _code(error) in _CONTENDED)(put)
        except ClientError as error:
            if _code(error) in _TAKEN:
                return self._writer(name) == mark
            raise
        return True

    def _writer(self, name: str) -> str:
        """Return the mark of the object's first writer; "" if it has none or is gone."""
        with contextlib.suppress(FileNotFoundError), self._named(name):
            head = self.client.head_object(Bucket=self.bucket, Key=self._key(name))
            return head["Metadata"].get(_WRITER, "")
        return ""

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        address = f"s3://{self.bucket}/{self._key(name)}"
        try:
            yield
        except (ClientError, Boto3Error) as error:
            # If a transfer fails, the rejection that caused it is only in its context.
            refusal = error if isinstance(error, ClientError) else error.__context__
            code = _code(refusal)
            if code in _ABSENT:
                raise FileNotFoundError(address) from error
            what = "it changed while it was read" if code in _TAKEN else code or error
            failed = StorageError(f"{address}: {what}", remedy=_remedy(code))
            failed.denied = code in _REFUSED
            raise failed from error
        except BotoCoreError as error:
            code = "AccessDenied" if isinstance(error, NoCredentialsError) else ""
            raise StorageError(f"{address}: {error}", remedy=_remedy(code)) from error


def _check_answer(
    bucket: str, http_response: Any, parsed: Mapping[str, Any], model: Any, **_: Any
) -> None:
    """Check that the answer to a request is one of S3, not the page of a proxy with the status 200.

    boto3 would take such a page for an empty listing, or for a write that was done.

    Raises:
        StorageError: if it is not.
    """
    if http_response.status_code >= 300:
        return
    lacks = _ALWAYS.get(model.name, "") or ("ETag" if _is_page(parsed) else "")
    if lacks and lacks not in parsed:
        raise _odd(bucket, f"an answer to {model.name} without {lacks}")


def _check_times(bucket: str, response_dict: Mapping[str, Any], **_: Any) -> None:
    """Check the time of an object, for which botocore raises errors of any type.

    Raises:
        StorageError: it cannot be read.
    """
    from botocore.utils import parse_timestamp

    written = response_dict["headers"].get("last-modified")
    if written is None:
        return
    try:
        parse_timestamp(written)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise _odd(bucket, f"the time {written[:80]!r} (Last-Modified) of an object") from error


def _check_redirect(bucket: str, response: tuple[Any, Any] | None, **_: Any) -> None:
    """End what botocore does about a redirect: it asks for the bucket's region, again and again.

    Raises:
        StorageError: if the answer to that is a redirect without the region.
    """
    answer = response[0] if response else None
    if answer is not None and 300 <= answer.status_code < 400:
        if "x-amz-bucket-region" in answer.headers:
            return
        raise _odd(bucket, "a redirect that leads to no S3 server")


def _is_page(parsed: Mapping[str, Any]) -> bool:
    return str(parsed.get("ContentType", "")).startswith("text/html")


@cache
def _descriptions() -> Loader:
    """Return botocore's descriptions of services: megabytes of JSON, read once for all sessions."""
    import botocore.session

    loader: Loader = botocore.session.get_session().get_component("data_loader")
    return loader


def part_bytes(size: int) -> int:
    """Return the part size in bytes to upload an object of about `size` bytes."""
    needed = -(-size // PARTS)
    return min(max(CHUNK_BYTES, needed), LARGEST_PART)


def _transfer(size: int) -> TransferConfig:
    """Return boto3's settings to upload a stream of unknown size.

    By default, it sends at most 10,000 parts of 8 MiB.
    """
    from boto3.s3.transfer import TransferConfig

    part = part_bytes(size)
    config = TransferConfig(multipart_threshold=part, multipart_chunksize=part)
    # boto3 reads this many parts ahead. If parts are large, that would be gigabytes.
    config.max_in_memory_upload_chunks = max(2, min(10, READ_AHEAD_BYTES // part))
    return config


def _retry(transient: Callable[[Exception], bool]) -> Retry:
    return Retry(transient=transient, seconds=FOREVER, tries=ATTEMPTS)


def _code(error: BaseException | None) -> str:
    """Return the code of a rejection; "" for other errors."""
    from botocore.exceptions import ClientError

    return error.response["Error"]["Code"] if isinstance(error, ClientError) else ""


def _remedy(code: str) -> str:
    if code in _REFUSED:
        return (
            "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a role) with permission for this"
        )
    if code in _TAKEN:
        return "start again once nothing else writes there"
    if code in _BUSY:
        return "the server is overloaded or down: start again once it answers"
    if code == "NoSuchBucket":
        return "name a bucket that exists; AWS_ENDPOINT_URL chooses the server"
    return "check AWS_ENDPOINT_URL, the network and the credentials, then start again"
