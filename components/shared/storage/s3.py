"""Storage in an S3 bucket, by boto3; credentials come from its own chain."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from steadytrain.components.shared.errors import BadInput, StorageError
from steadytrain.components.shared.storage.base import CHUNK_BYTES, Buffer
from steadytrain.components.shared.storage.local import copy_file

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import MultipartUploadTypeDef

_BODY_ATTEMPTS = 6
_ABSENT = {"404", "NoSuchKey", "NotFound"}
_TAKEN = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing tells of an object: `tag` changes with its content."""

    name: str
    size: int
    tag: str


class S3Storage:
    """Objects below s3://bucket/prefix."""

    def __init__(self, uri: str, client: S3Client | None = None) -> None:
        parts = urlsplit(uri)
        if not parts.netloc:
            raise BadInput(f"address {uri!r} names no bucket", remedy="s3://BUCKET/PREFIX")
        self.bucket, self.prefix = parts.netloc, parts.path.strip("/")
        if client is not None:
            self.client = client

    @cached_property
    def client(self) -> S3Client:
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            config=Config(
                retries={"mode": "standard", "max_attempts": 6},
                connect_timeout=10,
                read_timeout=60,
            ),
        )

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def read(self, name: str) -> bytes:
        with self._named(name):
            return self.client.get_object(Bucket=self.bucket, Key=self._key(name))["Body"].read()

    def write(self, name: str, content: bytes, *, if_absent: bool = False) -> bool:
        from botocore.exceptions import ClientError

        with self._named(name):
            try:
                if if_absent:
                    self.client.put_object(
                        Bucket=self.bucket, Key=self._key(name), Body=content, IfNoneMatch="*"
                    )
                else:
                    self.client.put_object(Bucket=self.bucket, Key=self._key(name), Body=content)
            except ClientError as error:
                if if_absent and error.response["Error"]["Code"] in _TAKEN:
                    return False
                raise
        return True

    def write_stream(self, name: str, parts: Iterable[Buffer]) -> None:
        """As the protocol has it; the server checks each part against its SHA-256."""
        with self._named(name):
            self.client.upload_fileobj(
                io.BufferedReader(_Stream(parts), CHUNK_BYTES),
                self.bucket,
                self._key(name),
                {"ChecksumAlgorithm": "SHA256"},
            )

    def read_stream(self, name: str) -> Iterator[bytes]:
        """As the protocol has it; a body that breaks off is gone on with from there."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        done = broken = 0
        with self._named(name):
            while True:
                body = self.client.get_object(
                    Bucket=self.bucket, Key=self._key(name), Range=f"bytes={done}-"
                )["Body"]
                try:
                    for part in body.iter_chunks(CHUNK_BYTES):
                        done += len(part)
                        yield part
                    return
                except (HTTPClientError, IncompleteReadError):
                    broken += 1
                    if broken == _BODY_ATTEMPTS:
                        raise

    def exists(self, name: str) -> bool:
        try:
            with self._named(name):
                self.client.head_object(Bucket=self.bucket, Key=self._key(name))
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        return [item.name for item in self.describe(prefix)]

    def describe(self, prefix: str = "") -> Sequence[ObjectInfo]:
        """As `list`, with size and entity tag."""
        with self._named(prefix):
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._key(prefix)
            )
            found = [item for page in pages for item in page.get("Contents", [])]
        objects = (
            ObjectInfo(item["Key"][self._cut :], item["Size"], item["ETag"])
            for item in found
            if not item["Key"].endswith("/")
        )
        return sorted(objects, key=lambda item: item.name)

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
        for upload in self._uploads(f"{folder}/"):
            with self._named(folder):
                self.client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def _uploads(self, prefix: str) -> Sequence[MultipartUploadTypeDef]:
        """Multipart uploads that were begun and not completed."""
        with self._named(prefix):
            pages = self.client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self.bucket, Prefix=self._key(prefix)
            )
            return [item for page in pages for item in page.get("Uploads", [])]

    @property
    def _cut(self) -> int:
        """Length of what a key has before an object's name."""
        return len(self.prefix) + 1 if self.prefix else 0

    def download(self, name: str, path: Path) -> None:
        partial = path.with_name(f".partial-{path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._named(name):
                self.client.download_file(self.bucket, self._key(name), str(partial))
            copy_file(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def upload(self, path: Path, name: str) -> None:
        with self._named(name):
            self.client.upload_file(str(path), self.bucket, self._key(name))

    def sub(self, prefix: str) -> S3Storage:
        return S3Storage(f"s3://{self.bucket}/{self._key(prefix)}", self.client)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    @contextlib.contextmanager
    def _named(self, name: str) -> Iterator[None]:
        from boto3.exceptions import S3UploadFailedError
        from botocore.exceptions import BotoCoreError, ClientError

        place = f"s3://{self.bucket}/{self._key(name)}"
        try:
            yield
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in _ABSENT:
                raise FileNotFoundError(place) from error
            raise StorageError(f"{place}: {code}", remedy=_remedy(code)) from error
        except (BotoCoreError, S3UploadFailedError) as error:
            raise StorageError(f"{place}: {error}", remedy=_remedy("")) from error


class _Stream(io.RawIOBase):
    """Reads what an iterable of buffers gives."""

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self.parts, self.left = iter(parts), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        while not self.left:
            found = next(self.parts, None)
            if found is None:
                return 0
            self.left = memoryview(found)
        count = min(len(target), len(self.left))
        target[:count], self.left = self.left[:count], self.left[count:]
        return count


def _remedy(code: str) -> str:
    if code in {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"}:
        return "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or a role) that may do this"
    if code == "NoSuchBucket":
        return "name a bucket that exists; AWS_ENDPOINT_URL_S3 chooses the server"
    return "check AWS_ENDPOINT_URL_S3, the network and the credentials, then start again"
