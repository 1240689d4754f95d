"""The metrics of pods, fetched through the API server as Prometheus fetches them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from kubernetes import client
from prometheus_client.parser import text_string_to_metric_families
from urllib3.exceptions import HTTPError

Scrape = dict[str, float]
"""Value by name and labels."""


@contextlib.contextmanager
def scraping(namespace: str, pods: Sequence[str], port: int) -> Iterator[list[Scrape]]:
    """Fetch the metrics of each pod that answers, every second; yield them in order."""
    found: list[Scrape] = []
    done = threading.Event()
    # A client of its own: an exec in another thread changes the client that it uses. It does not
    # retry, since the warnings about that would bury a failure's own message.
    settings = client.Configuration.get_default_copy()
    settings.retries = False
    core = client.CoreV1Api(client.ApiClient(settings))

    def work() -> None:
        while not done.wait(1):
            for pod in pods:
                with contextlib.suppress(client.ApiException, HTTPError):
                    found.append(_scrape(core, namespace, pod, port))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def counters(scrapes: Sequence[Scrape]) -> dict[str, list[float]]:
    """Return the values of each counter and of each part of a histogram, in order."""
    names = {name for scrape in scrapes for name in scrape}
    counting = [
        name
        for name in names
        if name.partition("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))
    ]
    return {
        name: [scrape[name] for scrape in scrapes if name in scrape] for name in sorted(counting)
    }


def _scrape(core: client.CoreV1Api, namespace: str, pod: str, port: int) -> Scrape:
    text = core.connect_get_namespaced_pod_proxy_with_path(f"{pod}:{port}", namespace, "metrics")
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
