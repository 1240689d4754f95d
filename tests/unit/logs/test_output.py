"""What programs print goes into logs that hold no secrets."""

from __future__ import annotations

import io
import os
import sys

import pytest

from steadytrain.components.shared import output_log

SECRET = "s3cr3t-value"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("DB_PASS", SECRET)


@pytest.mark.parametrize(
    "pieces",
    [
        [f"before {SECRET} after\n"],
        ["before ", SECRET[:5], SECRET[5:], " after\n"],
        [f"before {SECRET} after\nnext", " line"],
    ],
)
def test_secret_is_removed_however_it_is_written(pieces):
    stream = io.StringIO()
    text = output_log.RedactedText(stream)
    assert sum(map(text.write, pieces)) == sum(map(len, pieces))
    text.flush()
    assert stream.getvalue() == "".join(pieces).replace(SECRET, "[redacted]")


def test_start_of_a_line_waits_for_its_end_or_for_a_flush():
    stream = io.StringIO()
    text = output_log.RedactedText(stream)
    text.write("10 %")
    assert stream.getvalue() == ""
    text.flush()
    text.write("\r20 %")
    text.flush()
    assert stream.getvalue() == "10 %\r20 %"


def test_output_is_wrapped_once(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    output_log.redact_output()
    wrapped = sys.stdout
    output_log.redact_output()
    assert sys.stdout is wrapped
    print(SECRET)
    assert wrapped._stream.getvalue() == "[redacted]\n"


def test_log_is_private_and_appended_to(tmp_path):
    path = tmp_path / "log"
    for text in (b"one\n", b"two\n"):
        descriptor = output_log.open_log(path)
        os.write(descriptor, text)
        os.close(descriptor)
    assert path.read_bytes() == b"one\ntwo\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_file_keeps_every_other_byte(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a\r\n\xff\x00 " + SECRET.encode() + b" \xc3\xa9\nlast")
    output_log.redact_file(path)
    assert path.read_bytes() == b"a\r\n\xff\x00 [redacted] \xc3\xa9\nlast"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_file_without_a_secret_is_not_written(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"nothing here\n")
    before = path.stat()
    output_log.redact_file(path)
    output_log.redact_file(tmp_path / "missing")
    assert path.stat().st_ino == before.st_ino


def test_file_that_cannot_be_replaced_is_reported(tmp_path, capsys):
    folder = tmp_path / "log"
    folder.mkdir()
    output_log.redact_file(folder)
    assert f"secrets in {folder} could not be removed: Is a directory" in capsys.readouterr().err
