"""Runs in a folder, and its copy on S3, look the same; a long run is read in small parts."""

from __future__ import annotations

import time

import boto3
import pytest
from starlette.testclient import TestClient

from steadytrain.components.shared.config import load
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events.stream import to_json
from steadytrain.components.shared.events.types import TrainingStep, Validated
from steadytrain.components.shared.lease import hold
from steadytrain.components.shared.storage import S3Storage, s3
from steadytrain.pipelines.view import source as sources
from steadytrain.pipelines.view.app import application, news
from steadytrain.pipelines.view.library import Board, Library
from steadytrain.pipelines.view.reader import LARGEST_CONFIG, full
from steadytrain.pipelines.view.source import Folder, Stamp, open_source

from support.s3 import make_bucket, moto_server


class Counted(Folder):
    """A folder that counts what is read from it."""

    def __init__(self, output):
        super().__init__(output)
        self.bytes = self.reads = 0

    def read(self, run, name, start=0, end=None):
        part = super().read(run, name, start, end)
        self.bytes += len(part)
        self.reads += 1
        return part


def lengthen(run, steps):
    """Append training steps to a run."""
    event = TrainingStep(
        time=run.clock, attempt=1, step=987654321, epoch=0.5, loss=2.1, learning_rate=1e-4,
        grad_norm=1.0, tokens=1, tokens_per_second=64e3, gpu_memory_used=0, memory_used=10**9,
    )  # fmt: skip
    before, after = to_json(event, job_id="long").split(str(event.step))
    with (run.workspace.events / "rank-0.jsonl").open("a") as file:
        file.writelines(f"{before}{step}{after}\n" for step in steps)


@pytest.mark.slow
def test_list_opens_only_the_runs_of_its_page(output, make_run):
    for number in range(60):
        make_run(f"run-{number:02}").attempt(1, last=2_000, max_steps=4_000)
    counted = Counted(output)
    client = TestClient(application(counted, hosts=("testserver",)))
    assert counted.bytes == 0
    client.get("/")
    first = counted.bytes
    whole = sum(path.stat().st_size for path in output.rglob("*.jsonl"))
    assert 0 < first < whole * 50 / 60
    client.get("/")
    # Only whether a process works on a run is looked up again.
    assert counted.bytes == first


def test_bytes_read_for_a_page_do_not_grow_with_the_run(output, make_run):
    run = make_run("long")
    run.attempt(1, last=100, max_steps=10**6)
    lengthen(run, range(200, 60_000))
    size = (run.workspace.events / "rank-0.jsonl").stat().st_size
    counted = Counted(output)
    opened = Library(counted).open("long")
    assert opened.is_sample
    assert counted.bytes < 2_500_000 < size / 9
    assert opened.row.step == 59_999
    assert [event.step for event in opened.facts.of(TrainingStep)][-1] == 59_999


def test_rest_of_a_long_run_is_read_in_the_background(output, make_run):
    run = make_run("long")
    run.attempt(1, last=100, max_steps=10**6)
    lengthen(run, range(200, 9_000))
    run.validated(9_000, best=True)
    lengthen(run, range(9_001, 40_000))
    library = Library(open_source(str(output)))
    first = library.open("long")
    assert first.unread
    versions = {library.version(["long"]) for _ in range(2)}
    opened = library.open("long")
    assert opened.unread == 0
    assert 9_000 in [event.step for event in opened.facts.of(Validated)]
    assert len(versions) == 1


def test_version_changes_with_what_a_page_shows(output, make_run, monkeypatch):
    monkeypatch.setattr("steadytrain.pipelines.view.library.LOOK_SECONDS", 0.0)
    run, _ = make_run("first"), make_run("second")
    library = Library(open_source(str(output)))
    everything, first, second = (library.version(runs) for runs in ((), ["first"], ["second"]))
    assert library.version() == everything
    run.attempt(1, last=10, max_steps=10)
    assert library.version() != everything
    assert library.version(["first"]) != first
    assert library.version(["second"]) == second
    assert library.version(["no-such", "../x"]) == library.version(["no-such"])


def test_link_in_a_run_shows_no_file_from_elsewhere(output, make_run, tmp_path):
    make_run("mine").attempt(1, last=2, max_steps=4)
    (tmp_path / "key").write_text("c4n4ry")
    run = output / "runs" / "mine"
    (run / "attempts/0001").mkdir(parents=True, exist_ok=True)
    (run / "attempts/0001/rank-0.log").symlink_to(tmp_path / "key")
    (run / "attempts/0002").symlink_to(tmp_path)
    (run / "config.yaml").unlink(missing_ok=True)
    (run / "config.yaml").symlink_to(tmp_path / "key")
    (tmp_path / "rank-0.log").write_text("c4n4ry")
    folder = Folder(output)
    names = ["config.yaml", *folder.logs("mine")]
    assert len(names) == 3
    assert [folder.read("mine", name) for name in names] == [b""] * 3


def test_output_folder_and_runs_may_be_links(output, make_run, tmp_path):
    make_run("mine").attempt(1, last=2, max_steps=4)
    (tmp_path / "there").symlink_to(output)
    (output / "runs" / "other").symlink_to("mine")
    linked = Folder(tmp_path / "there")
    assert linked.read("other", "config.yaml") == linked.read("mine", "config.yaml") != b""


def test_addresses(tmp_path):
    (tmp_path / "file").touch()
    for address in ("", str(tmp_path / "file"), "s3://", "x" * 300):
        with pytest.raises(BadInput) as found:
            open_source(address)
        assert found.value.remedy
    assert open_source(str(tmp_path / "new")).runs() == []


@pytest.fixture(scope="module")
def server():
    with moto_server() as port:
        yield port


@pytest.fixture
def copy(output, server, monkeypatch):
    """Return a function that copies the output folder to S3, and returns its address."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server}")
    monkeypatch.setattr(sources, "LISTING_SECONDS", 0.0)
    prefix = f"team/{time.monotonic_ns()}"

    def upload():
        make_bucket(server, "bucket")
        client = boto3.client("s3")
        for path in output.rglob("*"):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(output).as_posix()}"
                client.upload_file(str(path), "bucket", key)
        return f"s3://bucket/{prefix}"

    return upload


@pytest.mark.slow
def test_copy_on_s3_shows_the_same(output, make_run, copy):
    run = make_run("first")
    run.attempt(1, last=170, max_steps=400, outcome="failed", failure_class="gpu_oom", message="m")
    run.attempt(2, first=100, last=400, max_steps=400)
    lengthen(run, range(401, 1_000))
    (run.workspace.attempts / "1").mkdir(parents=True)
    (run.workspace.attempts / "1" / "rank-0.log").write_text("hello\n")
    make_run("second")
    local, remote = open_source(str(output)), open_source(copy())
    assert remote.runs() == local.runs() == ["first", "second"]
    assert remote.logs("first").keys() == local.logs("first").keys()
    for name in local.runs():
        row, other = Board(local).row(name), Board(remote).row(name)
        assert row.as_data() | {"active": None} == other.as_data() | {"active": None}
    client = TestClient(application(remote, hosts=("testserver",)))
    page = client.get("/runs/first").text
    assert "Timeline. 2 attempts" in page
    assert "learning_rate" in page
    assert "hello" in client.get("/runs/first/log?file=attempts/1/rank-0.log").text


@pytest.mark.slow
def test_run_on_s3_is_followed(output, make_run, copy):
    run = make_run("first")
    run.attempt(1, last=100, max_steps=400)
    library = Library(open_source(copy()))
    assert library.open("first").row.step == 100
    lengthen(run, [150])
    copy()
    time.sleep(1.1)
    assert library.open("first").row.step == 150


def test_run_on_s3_is_running_while_its_lease_is_renewed(output, make_run, copy):
    make_run("first")
    address = copy()
    storage = S3Storage(f"{address}/runs/first/lease")
    remote = open_source(address)
    assert not remote.is_held("first")
    with hold(storage, run_id="first", seconds=30.0):
        assert remote.is_held("first")
    assert not remote.is_held("first")


def test_server_that_fails_is_reported_on_the_page(output, make_run, copy, monkeypatch):
    make_run("first")
    monkeypatch.setattr(s3, "ATTEMPTS", 1)
    remote = open_source(copy().replace("s3://bucket", "s3://no-such-bucket"))
    client = TestClient(application(remote, hosts=("testserver",)))
    for path in ("/", "/runs/first", "/compare?run=first&run=second"):
        answer = client.get(path)
        assert answer.status_code == 502
        assert "NoSuchBucket" in answer.text
    assert news(Library(remote), []) is None


def test_missing_object_is_empty(output, make_run, copy):
    make_run("first")
    remote = open_source(copy())
    assert remote.read("first", "no-such") == b""
    assert remote.read("first", "events/begin.jsonl", 10**9) == b""
    remote._listed = {"first": {"gone": Stamp(5, 0.0)}}
    remote._until = float("inf")
    assert remote.read("first", "gone") == b""


def test_huge_configuration_is_cut_with_a_note(tmp_path):
    folder = tmp_path / "runs" / "big"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_bytes(b"name: big\n" + b"# more\n" * 200_000)
    facts = full(open_source(str(tmp_path)), "big", [])
    assert len(facts.config_text) <= LARGEST_CONFIG
    assert facts.config == {}
    (note,) = facts.unreadable
    assert "config.yaml is larger than" in note


def test_configuration_that_lost_its_end_is_named(tmp_path):
    folder = tmp_path / "runs" / "cut"
    folder.mkdir(parents=True)
    text = load("causal-lm").to_saved().decode()
    for place, told in ((text.index("\ngate:") + 1, 1), (len(text), 0)):
        (folder / "config.yaml").write_text(text[:place])
        facts = full(open_source(str(tmp_path)), "cut", [])
        assert len([note for note in facts.unreadable if "gate (missing)" in note]) == told
