"""The endpoint of a run, as Prometheus's own parser reads it."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from steadytrain.components.observe import prometheus
from steadytrain.components.observe.prometheus import PrometheusSink
from steadytrain.components.observe.run_metrics import RunMetrics
from steadytrain.components.shared import plugins
from steadytrain.components.shared.errors import BadInput
from steadytrain.components.shared.events import read_events
from steadytrain.components.shared.events.types import Warned
from steadytrain.components.shared.workspace import Workspace

from support.command import wait_for
from support.ports import free_port
from support.written_run import Writer

LABELS = {"run": "tiny-1", "model": "tiny"}


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def serving(make_config, port):
    """Open sinks that look for events often, and close them at the end."""
    with contextlib.ExitStack() as opened:

        def start(**observability):
            section = {"prometheus_port": port, "prometheus_linger_seconds": 0, **observability}
            config = make_config(observability=section)
            sink = PrometheusSink(config, Workspace.of(config), poll_seconds=0.05)
            opened.callback(sink.close)
            return sink

        yield start


def fetch(port, path="/metrics", host="127.0.0.1"):
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=300) as answer:
        return answer.read().decode()


def scrape(port, host="127.0.0.1"):
    """Return the samples by name and labels, once the endpoint answers."""
    texts = []

    def answered():
        with contextlib.suppress(OSError):
            texts.append(fetch(port, host=host))
        return bool(texts)

    wait_for(answered)
    return {
        (sample.name, *sorted(set(sample.labels.items()) - set(LABELS.items()))): sample.value
        for family in text_string_to_metric_families(texts[0])
        for sample in family.samples
        if set(LABELS.items()) <= set(sample.labels.items())
    }


def warnings(workspace):
    return [event.message for event in read_events(workspace.events) if isinstance(event, Warned)]


def test_scrape_has_what_the_events_say(written, serving, port):
    serving(budget_usd=12.5)
    found = scrape(port)
    expected = RunMetrics.of(read_events(written.workspace.events)).current()
    assert found["cost_usd_total",] == pytest.approx(expected.values["cost_usd", ""])
    assert found["failures_total", ("class", "gpu_oom")] == 1
    assert found["failures_total", ("class", "network")] == 0
    assert found["run_seconds", ("phase", "useful")] > 0
    assert found["training_duration_seconds_count",] == 1
    assert found["training_duration_seconds_bucket", ("le", "600.0")] == 1
    assert found["training_duration_seconds_sum",] == pytest.approx(
        expected.distributions["training_duration_seconds"].sum
    )
    assert found["checkpoint_size_mb_bucket", ("le", "100.0")] == 5
    assert found["cost_budget_usd",] == 12.5
    assert found["sink_queue_bytes",] > 1000
    assert found["sink_lag_seconds",] > 1e6


def test_address_of_either_family_reaches_it(written, serving, port):
    serving(prometheus_host="")
    scrape(port)
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert scrape(port, host="[::1]")["attempts_total",] == 3


@pytest.mark.parametrize("in_a_pod", [False, True])
def test_only_pods_listen_on_all_addresses(written, serving, port, monkeypatch, in_a_pod):
    if in_a_pod:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    serving()
    scrape(port)
    # Every address of 127.0.0.0/8 is this machine's, but only one of them is listened to.
    with contextlib.ExitStack() as expected:
        if not in_a_pod:
            expected.enter_context(pytest.raises(ConnectionRefusedError))
        socket.create_connection(("127.0.0.2", port), timeout=300).close()


def test_host_that_is_not_here_is_a_warning(written, serving):
    serving(prometheus_host="203.0.113.1")
    wait_for(lambda: warnings(written.workspace))
    assert "prometheus_host '203.0.113.1'" in warnings(written.workspace)[0]


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def slow(clients, port, count, text=b"GET /metrics HTTP/1.1\r\n"):
    for _ in range(count):
        client = clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=300))
        with contextlib.suppress(OSError):
            client.sendall(text)


@pytest.mark.slow
def test_hundreds_of_slow_clients_take_few_descriptors_and_delay_nobody(written, serving, port):
    serving()
    scrape(port)
    before = open_descriptors()
    with contextlib.ExitStack() as clients:
        slow(clients, port, 300)
        assert scrape(port)["attempts_total",] == 3
        # The clients' own ends are descriptors of this process too.
        wait_for(lambda: open_descriptors() - before < 300 + prometheus.MOST_CONNECTIONS + 10)


@pytest.mark.timeout(300)
def test_client_that_sends_a_byte_now_and_then_has_a_deadline(written, serving, port, monkeypatch):
    serving()
    scrape(port)
    monkeypatch.setattr(prometheus, "CLIENT_SECONDS", 1.0)
    connection = socket.create_connection(("127.0.0.1", port), timeout=300)
    with connection as client, contextlib.suppress(OSError):
        while True:
            client.sendall(b"x")
            client.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                if not client.recv(1):
                    break


def test_long_headers_are_not_read(written, serving, port):
    serving()
    scrape(port)
    with socket.create_connection(("127.0.0.1", port), timeout=300) as client:
        with contextlib.suppress(OSError):
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 10_000_000)
        with contextlib.suppress(ConnectionResetError):
            assert not client.recv(1)
    assert scrape(port)["attempts_total",] == 3


LACKING = """
import resource, socket, sys, time
from prometheus_client.registry import Collector
from steadytrain.components.observe.prometheus import Endpoint

class Nothing(Collector):
    def collect(self):
        return []

tries, accept = [], socket.socket.accept

def counted(listener):
    tries.append(1)
    return accept(listener)

socket.socket.accept = counted
port = int(sys.argv[1])
Endpoint(port, Nothing(), "127.0.0.1")
held = [socket.socket() for _ in range(20)]
lowest = held[-1].fileno() + 1
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
print("full", flush=True)
while not tries:
    time.sleep(0.01)
time.sleep(1)
held.pop().close()
held.pop().close()
print(len(tries), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_lack_of_descriptors_delays_a_scrape_and_nothing_else(tmp_path):
    """The process cannot accept for a second. It does not try all the time."""
    port = free_port()
    command = [sys.executable, "-c", LACKING, str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "full\n"
        assert fetch(port) == ""
        assert int(process.stdout.readline()) < 100
        _, said = process.communicate()
    assert (process.returncode, said) == (0, "")


def test_only_metrics_are_served(written, serving, port):
    serving()
    scrape(port)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(port, "/")


def test_events_that_arrive_are_in_the_next_scrape(make_config, serving, port):
    run = Writer(make_config())
    serving()
    assert scrape(port)["attempts_total",] == 0
    run.attempt(1, last=100, max_steps=500, outcome="preempted")
    wait_for(lambda: scrape(port).get(("training_step",)) == 100)
    assert scrape(port)["attempts_total",] == 1


def test_next_supervisor_serves_the_same_counters(written, serving, port):
    first = serving()
    before = scrape(port)
    first.close()
    serving()
    after = scrape(port)
    assert after.keys() == before.keys()
    # Only the age of what MLflow lacks depends on the time.
    assert {name: after[name] for name in after if name != ("sink_lag_seconds",)} == {
        name: before[name] for name in before if name != ("sink_lag_seconds",)
    }


def test_port_in_use_is_a_warning_until_it_is_free(written, serving, port):
    with socket.create_server(("", port)):
        serving()
        wait_for(lambda: warnings(written.workspace))
        time.sleep(0.3)
    assert scrape(port)["attempts_total",] == 3
    (message,) = warnings(written.workspace)
    assert f"observability.prometheus_port {port}: Address already in use" in message


@pytest.mark.usefixtures("written")
def test_clients_that_hang_delay_nobody(serving, port):
    serving()
    scrape(port)
    with contextlib.ExitStack() as hanging:
        for _ in range(20):
            client = hanging.enter_context(socket.create_connection(("127.0.0.1", port)))
            client.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert scrape(port)["attempts_total",] == 3


def closing(sink):
    """Close a sink in a thread, and return that once the sink waits for a last scrape."""
    thread = threading.Thread(target=sink.close)
    thread.start()
    # An endpoint answers before the sink has it.
    wait_for(lambda: sink._endpoint and sink._endpoint._round == 1)
    return thread


def has_ended(thread):
    """Wait for a thread for less long than the sinks of these tests would wait for a scrape."""
    thread.join(300)
    return not thread.is_alive()


def test_it_waits_at_the_end_for_one_scrape_of_the_final_values(written, serving, port):
    sink = serving(prometheus_linger_seconds=600)
    scrape(port)
    thread = closing(sink)
    with pytest.raises(urllib.error.HTTPError):
        fetch(port, "/")
    time.sleep(0.2)
    assert thread.is_alive()
    assert scrape(port)["training_duration_seconds_count",] == 1
    assert has_ended(thread)


@pytest.mark.parametrize("answered", [False, True], ids=["at-once", "with-the-answer-unread"])
def test_client_that_gave_up_does_not_have_the_final_values(written, serving, port, answered):
    sink = serving(prometheus_linger_seconds=600)
    scrape(port)
    thread = closing(sink)
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            if answered:
                assert select.select([client], [], [], 300)[0]
    time.sleep(0.5)
    assert thread.is_alive()
    scrape(port)
    assert has_ended(thread)


@pytest.mark.timeout(300)
def test_it_waits_no_longer_than_it_may(written, serving, port):
    sink = serving(prometheus_linger_seconds=0.5)
    scrape(port)
    sink.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("outcome", ["preempted", "stopped"])
def test_run_that_others_continue_does_not_wait(make_config, serving, port, outcome):
    Writer(make_config()).attempt(1, last=100, max_steps=500, outcome=outcome)
    sink = serving(prometheus_linger_seconds=600)
    scrape(port)
    sink.close()


def test_secrets_of_the_environment_are_in_no_warning_and_no_scrape(
    make_config, serving, port, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "canary-0123456789")
    run = Writer(make_config())
    ending = {"failure_class": "canary-0123456789", "message": "canary-0123456789"}
    run.attempt(1, last=10, max_steps=500, outcome="failed", **ending)
    serving()
    wait_for(lambda: scrape(port)["attempts_total",] == 1)
    text = fetch(port)
    assert "canary" not in text
    assert scrape(port)["failures_total", ("class", "unknown")] == 1


def test_port_adds_the_sink_and_keeps_the_run(make_config):
    without, with_port = make_config(), make_config(observability={"prometheus_port": 9464})
    assert without.sinks == ("mlflow", "diagnosis")
    assert with_port.sinks == ("mlflow", "prometheus", "diagnosis")
    assert with_port.digest() == without.digest()
    assert plugins.load(plugins.SINKS, "prometheus") is PrometheusSink


def test_sink_by_name_is_rejected_since_it_needs_a_port(make_config):
    with pytest.raises(BadInput, match=r"set observability.prometheus_port") as raised:
        make_config(tracking={"sinks": ["prometheus"]})
    assert "tracking.sinks" in raised.value.message
