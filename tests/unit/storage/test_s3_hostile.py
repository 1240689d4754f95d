"""Servers and gateways that deviate from S3 cause clear errors, never wrong content."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from steadytrain.components.shared import http_client, retry
from steadytrain.components.shared.errors import StorageError
from steadytrain.components.shared.storage import open_storage, s3

CONTENT = bytes(range(256)) * 40
TAG = {"ETag": '"one"'}
ENTRY = (
    "<Contents><Key>p/a</Key><LastModified>2026-01-01T00:00:00Z</LastModified>"
    "<ETag>&quot;one&quot;</ETag><Size>1</Size></Contents>"
)


@pytest.fixture
def answered(credentials, monkeypatch):
    """Make storage on a server that answers with what a function returns.

    The function receives path, headers, and request count. It returns a status, headers, and a
    body. Content-Length is the length of the body unless a header overrides it.
    """
    monkeypatch.setattr(retry, "DELAYS", (0.01, 8.0))
    with contextlib.ExitStack() as held:

        def make(answer):
            counter = itertools.count(1)

            class Handler(BaseHTTPRequestHandler):
                protocol_version = "HTTP/1.1"

                def do_GET(self):
                    self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    status, headers, body = answer(self.path, self.headers, next(counter))
                    self.send_response(status)
                    for name, value in ({"Content-Length": len(body)} | headers).items():
                        if value is not None:
                            self.send_header(name, str(value))
                    self.end_headers()
                    with contextlib.suppress(ConnectionError):
                        for part in body.parts() if isinstance(body, Trickled) else [body]:
                            self.wfile.write(part)
                            self.wfile.flush()
                    self.close_connection = True

                do_HEAD = do_PUT = do_GET  # noqa: N815

                def log_message(self, *_):
                    pass

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            held.callback(server.server_close)
            held.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.server_port}")
            return open_storage("s3://bucket/p")

        yield make


class Trickled(bytes):
    """A body that is sent byte by byte."""

    def parts(self):
        for byte in self:
            time.sleep(0.05)
            yield bytes([byte])


def cut(headers):
    """Return the first answer, which breaks off early."""
    return 200, {**headers, "Content-Length": len(CONTENT)}, CONTENT[:4000]


def test_server_that_ignores_ranges_corrupts_nothing(answered):
    storage = answered(lambda *asked: cut(TAG) if asked[2] == 1 else (200, TAG, CONTENT))
    with pytest.raises(StorageError, match=r"requested bytes from 4000 on \(Range\)"):
        storage.read("a")


def test_part_of_an_object_is_that_part_or_an_error(answered):
    part = 206, {"Content-Range": f"bytes 4000-4099/{len(CONTENT)}"}, CONTENT[4000:4100]
    assert answered(lambda *_: part).read_range("a", 4000, 4100) == CONTENT[4000:4100]
    with pytest.raises(StorageError, match=r"requested bytes from 4000 on \(Range\)"):
        answered(lambda *_: (200, TAG, CONTENT)).read_range("a", 4000, 4100)
    short = 206, {**part[1], "Content-Length": 100}, CONTENT[4000:4050]
    with pytest.raises(StorageError):
        answered(lambda *_: short).read_range("a", 4000, 4100)


def test_empty_responses_end(answered):
    empty = 206, {"Content-Range": f"bytes 4000-4000/{len(CONTENT)}"}, b""
    storage = answered(lambda *asked: cut(TAG) if asked[2] == 1 else empty)
    with pytest.raises(StorageError, match="4000 of 10240 bytes, and then nothing"):
        storage.read("a")


def test_response_longer_than_announced_is_rejected(answered):
    storage = answered(lambda *_: (200, {**TAG, "Content-Length": -3}, CONTENT))
    with pytest.raises(StorageError, match="of the -3 bytes of an object"):
        storage.read("a")


def test_object_without_a_tag_is_read_to_its_end(answered):
    rest = 206, {"Content-Range": f"bytes 4000-10239/{len(CONTENT)}"}, CONTENT[4000:]
    storage = answered(lambda *asked: cut({}) if asked[2] == 1 else rest)
    assert storage.read("a") == CONTENT


def test_object_without_a_length_is_read_to_its_end(answered):
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(CONTENT), CONTENT)
    told = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    assert answered(lambda *_: (200, told, chunked)).read("a") == CONTENT


def test_object_that_changes_while_it_is_read_is_an_error(answered):
    storage = answered(lambda *asked: cut(TAG) if asked[2] == 1 else (412, {}, b""))
    with pytest.raises(StorageError, match="it changed while it was read"):
        storage.read("a")


@pytest.mark.parametrize("written", ["yesterday", "Thu, 99 Foo 2026 00:00:00 GMT", "9" * 400])
def test_unreadable_time_of_an_object_is_an_error(answered, tmp_path, written):
    storage = answered(lambda *_: (200, {**TAG, "Last-Modified": written}, CONTENT))
    for operation in (
        lambda: storage.read("a"),
        lambda: storage.exists("a"),
        lambda: storage.download("a", tmp_path / "a"),
    ):
        with pytest.raises(StorageError, match=r"sent the time .* \(Last-Modified\)"):
            operation()


def test_answer_that_trickles_ends(answered, tmp_path, monkeypatch):
    """Each byte comes in time, but all of them would take minutes."""
    monkeypatch.setattr(http_client, "SECONDS", 0.3)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)

    def answer(path, headers, count):
        if "Range" not in headers:
            return 200, TAG, Trickled(CONTENT)
        rest = {"Content-Range": f"bytes 0-{len(CONTENT) - 1}/{len(CONTENT)}"}
        return 206, {**TAG, **rest}, Trickled(CONTENT)

    storage = answered(answer)
    for operation in (
        lambda: storage.read("a"),
        lambda: storage.list(),
        lambda: storage.download("a", tmp_path / "a"),
    ):
        with pytest.raises(StorageError, match=r"timeout|Max Retries"):
            operation()


@pytest.mark.slow
def test_rejection_before_the_body_that_trickles_ends(answered, monkeypatch):
    """botocore reads the status line itself, when it has asked whether to send the body."""
    monkeypatch.setattr(http_client, "SECONDS", 0.3)
    # A part that is sent has more time, by its size.
    monkeypatch.setattr(http_client, "SLOWEST", 1e9)
    monkeypatch.setattr(s3, "ATTEMPTS", 2)
    storage = answered(lambda *_: (403, {}, Trickled(CONTENT)))
    with pytest.raises(StorageError):
        storage.write_stream("a", [bytes(5 << 20)])


def test_time_that_the_reader_takes_is_not_the_servers(answered, monkeypatch):
    content, requests, passed = CONTENT * 2000, [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(http_client, "time", clock)

    def answer(path, headers, count):
        requests.append(headers.get("Range"))
        return 200, TAG, content

    parts = answered(answer).read_stream("a")
    read = [next(parts)]
    passed[0] += 3600.0
    assert b"".join([*read, *parts]) == content
    assert requests == [None]


def listing(entries, token=""):
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    truncated = str(bool(token)).lower()
    body = f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{entries}"
    return 200, {"Content-Type": "application/xml"}, f"{body}</ListBucketResult>".encode()


@pytest.mark.parametrize("entries", ["", ENTRY])
def test_endless_listing_is_rejected(answered, entries):
    storage = answered(lambda *asked: listing(entries, token=f"next-{asked[2]}"))
    with pytest.raises(StorageError, match="an endless listing"):
        storage.list()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (ENTRY.replace("<ETag>&quot;one&quot;</ETag>", ""), "a listing without ETag"),
        (ENTRY.replace("<Size>1</Size>", "<Size>many</Size>"), "cannot be read"),
    ],
)
def test_listing_without_required_fields_is_an_error(answered, entries, said):
    with pytest.raises(StorageError, match=said):
        answered(lambda *_: listing(entries)).list()


@pytest.mark.parametrize(
    "page",
    [
        (200, {"Content-Type": "text/html"}, b"<html><body>Log in</body></html>"),
        (204, {}, b""),
    ],
)
def test_page_of_a_proxy_is_no_empty_listing_and_no_write(answered, page):
    storage = answered(lambda *_: page)
    with pytest.raises(StorageError, match="ListObjectsV2 without IsTruncated"):
        storage.list()
    for write in (storage.write, lambda name, content: storage.write_stream(name, [content])):
        with pytest.raises(StorageError, match="PutObject without ETag"):
            write("a", b"x")
    if page[2]:
        with pytest.raises(StorageError, match="GetObject without ETag"):
            storage.read("a")


def test_redirect_to_itself_is_an_error(answered):
    storage = answered(lambda *asked: (301, {"Location": asked[0]}, b""))
    with pytest.raises(StorageError, match="a redirect that leads to no S3 server"):
        storage.read("a")
