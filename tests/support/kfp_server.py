"""A small Kubeflow Pipelines server: the part of API v2beta1 that we use, and its errors.

It rejects the same requests as kubeflow/pipelines 2.17 (backend/src/apiserver): unknown fields,
duplicate or too long names, an invalid cron expression, an unknown parameter, an unknown page
token. Requests and responses have the fields of kfp_server_api's models.
"""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import re
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.parser import BytesParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api
import yaml

BASE = "/apis/v2beta1"
LENGTHS = {"experiments": 128, "pipelines": 128, "versions": 127}
NOT_FOUND, EXISTS, INVALID, INTERNAL = (404, 5), (409, 6), (400, 3), (500, 13)
MODELS = {
    "experiments": kfp_server_api.V2beta1Experiment,
    "pipelines": kfp_server_api.V2beta1Pipeline,
    "runs": kfp_server_api.V2beta1Run,
    "recurringruns": kfp_server_api.V2beta1RecurringRun,
}
KEYS = {
    "experiments": "experiment_id",
    "pipelines": "pipeline_id",
    "versions": "pipeline_version_id",
    "runs": "run_id",
    "recurringruns": "recurring_run_id",
}
LISTS = {
    "experiments": "experiments",
    "pipelines": "pipelines",
    "versions": "pipeline_versions",
    "runs": "runs",
    "recurringruns": "recurringRuns",
}
CRON_FIELD = re.compile(r"^(\?|\*(/\d+)?|[0-9A-Z]+(-[0-9A-Z]+)?(/\d+)?)(,[0-9A-Z]+(-[0-9A-Z]+)?)*$")


class Refused(Exception):
    """An error response."""

    def __init__(self, kind: tuple[int, int], message: str) -> None:
        super().__init__(message)
        self.status, self.code = kind


@dataclass
class Kfp:
    """The contents of the server, and how it behaves."""

    multi_user: bool = False
    token: str = ""
    page_size: int = 20
    script: list[list[tuple[str, str]]] = field(default_factory=list)
    """A run's states, one per query: lists of (task, state); the task "run" is the run itself."""
    things: dict[str, dict[str, dict[str, Any]]] = field(
        default_factory=lambda: {kind: {} for kind in KEYS}
    )
    requests: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    fail_next: list[tuple[str, int]] = field(default_factory=list)
    """(method and path prefix, status): the next such request gets this status, once."""
    lose_next: list[str] = field(default_factory=list)
    """Method and path prefix: the next such request is executed but answered with 502, once."""
    repeats: bool = False
    """Whether every page of a list repeats the first page's token as the next-page token."""
    address: str = ""
    pages: bool = True
    """Whether it is behind the UI's address."""
    logs: dict[str, str] = field(default_factory=dict)
    """The log of each pod that still exists."""

    def all(self, kind: str) -> list[dict[str, Any]]:
        return list(self.things[kind].values())

    def writes(self) -> list[str]:
        return [f"{method} {path}" for method, path in self.requests if method != "GET"]

    def lose_if_told(self, request: str) -> None:
        for item in self.lose_next:
            if request.startswith(item):
                self.lose_next.remove(item)
                raise Refused((502, 14), "Bad Gateway")

    # The methods below answer requests.

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes) -> Any:
        parts = path.removeprefix(BASE).strip("/").split("/")
        match method, parts:
            case "GET", [""] | ["apis", *_]:
                return self.plain(parts)
            case "GET", ["healthz"]:
                return {"multi_user": self.multi_user, "tag_name": "2.17.0", "commit_sha": "x"}
            case "POST", ["pipelines", "upload_version"]:
                return self.upload(query, body)
            case "GET", ["pipelines", name, "versions"]:
                return self.list("versions", query, pipeline_id=name)
            case "POST", ["recurringruns", action] if ":" in action:
                return self.switch(*action.split(":"))
            case "POST", [kind] if kind in MODELS:
                return self.create(kind, json.loads(body))
            case "GET", [kind] if kind in MODELS:
                return self.list(kind, query)
            case "GET", [kind, name] if kind in MODELS:
                return self.run(name) if kind == "runs" else self.find(kind, name)
            case "DELETE", ["recurringruns", name]:
                self.find("recurringruns", name)
                del self.things["recurringruns"][name]
                return {}
        raise Refused((404, 5), "Not Found")

    def find(self, kind: str, name: str) -> dict[str, Any]:
        if name not in self.things[kind]:
            raise Refused(NOT_FOUND, f"{kind} {name} not found.")
        return self.things[kind][name]

    def create(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        known_fields(content, MODELS[kind].__name__)
        if not content.get("display_name"):
            raise Refused(INVALID, f"{kind} name is empty. Please specify a valid name.")
        self.namespace_fits(content.get("namespace", ""), needed=kind in ("experiments",))
        if kind in LENGTHS:
            self.name_fits(kind, content["display_name"])
            if any(item["display_name"] == content["display_name"] for item in self.all(kind)):
                raise Refused(EXISTS, f"The name {content['display_name']} already exists.")
        else:
            self.check_runnable(content)
        if kind == "recurringruns":
            check_schedule(content)
            content["status"] = "ENABLED" if content.get("mode") == "ENABLE" else "DISABLED"
        made = {**content, KEYS[kind]: str(uuid.uuid4()), "created_at": now()}
        if kind == "runs":
            made["state"] = "PENDING"
        self.things[kind][made[KEYS[kind]]] = made
        return made

    def name_fits(self, kind: str, name: str) -> None:
        if len(name) > LENGTHS[kind]:
            raise Refused(INVALID, f"{kind}.Name length cannot exceed {LENGTHS[kind]}")

    def namespace_fits(self, namespace: str, *, needed: bool) -> None:
        if self.multi_user and needed and not namespace:
            raise Refused(INVALID, "Namespace cannot be empty in multi-user mode.")

    def check_runnable(self, content: dict[str, Any]) -> None:
        if content.get("experiment_id") not in self.things["experiments"]:
            raise Refused(NOT_FOUND, f"Experiment {content.get('experiment_id')} not found.")
        reference = content.get("pipeline_version_reference", {})
        version = self.find("versions", reference.get("pipeline_version_id", ""))
        spec = next(yaml.safe_load_all(version["file"]))
        known = spec["root"].get("inputDefinitions", {}).get("parameters", {})
        given = content.get("runtime_config", {}).get("parameters", {})
        for name in given:
            if name not in known:
                raise Refused(
                    INVALID, f"parameter(s) provided are not required by pipeline: {name}"
                )
            if known[name]["parameterType"] == "STRING" and not isinstance(given[name], str):
                raise Refused(INVALID, f"input parameter {name} requires type string")

    def upload(self, query: dict[str, str], body: bytes) -> dict[str, Any]:
        self.find("pipelines", query.get("pipelineid", ""))
        self.name_fits("versions", query["name"])
        same = {"pipeline_id": query["pipelineid"], "name": query["name"]}
        if any(same.items() <= item.items() for item in self.all("versions")):
            raise Refused(EXISTS, "Failed to create a pipeline version")
        message = BytesParser().parsebytes(b"Content-Type: " + body)
        file = message.get_payload()[0].get_payload(decode=True).decode()
        made = same | {"display_name": query["name"], "created_at": now(), "file": file}
        made |= {"pipeline_version_id": str(uuid.uuid4())}
        self.things["versions"][made["pipeline_version_id"]] = made
        return {key: value for key, value in made.items() if key != "file"}

    def list(self, kind: str, query: dict[str, str], **fixed: str) -> dict[str, Any]:
        self.namespace_fits(query.get("namespace", ""), needed=kind not in ("versions",))
        wanted = dict(fixed)
        parts: dict[str, str] = {}
        for predicate in json.loads(query.get("filter") or "{}").get("predicates", ()):
            key = "display_name" if predicate["key"] == "name" else predicate["key"]
            of = {"EQUALS": wanted, "IS_SUBSTRING": parts}[predicate["operation"]]
            of[key] = predicate["string_value"]
        found = [
            item
            for item in self.all(kind)
            if wanted.items() <= item.items()
            and all(text in item[key] for key, text in parts.items())
        ]
        try:
            begin = int(base64.b64decode(query.get("page_token") or "MA==", validate=True))
        except ValueError as error:
            raise Refused(INVALID, "Invalid page token") from error
        end = begin + min(int(query.get("page_size") or self.page_size), self.page_size)
        answer: dict[str, Any] = {LISTS[kind]: found[begin:end], "total_size": len(found)}
        if end < len(found):
            following = self.page_size if self.repeats else end
            answer["next_page_token"] = base64.b64encode(str(following).encode()).decode()
        return answer

    def run(self, name: str) -> dict[str, Any]:
        run = self.find("runs", name)
        if self.script:
            tasks = dict(self.script.pop(0))
            run["state"] = tasks.pop("run", "RUNNING")
            details = [
                task_detail(task, state, at) for at, (task, state) in enumerate(tasks.items())
            ]
            run["run_details"] = {"task_details": details}
        return run

    def plain(self, parts: list[str]) -> str:
        """Return the UI's page or the log of a pod, as run_log_server.go does."""
        if parts == [""]:
            if not self.pages:
                raise Refused(NOT_FOUND, "Not Found")
            return "<!DOCTYPE html>"
        *_, run, _, pod, _ = parts
        self.find("runs", run)
        if pod not in self.logs:
            raise Refused(INTERNAL, f"Failed to read logs for run {run}")
        return self.logs[pod]

    def switch(self, name: str, action: str) -> dict[str, Any]:
        item = self.find("recurringruns", name)
        item["mode"] = {"enable": "ENABLE", "disable": "DISABLE"}[action]
        item["status"] = f"{item['mode']}D"
        return {}


def known_fields(content: Any, model: str) -> None:
    """Reject unknown fields, as protojson does."""
    types = getattr(kfp_server_api, model).openapi_types
    for key, value in content.items():
        if key not in types:
            raise Refused(INVALID, f'proto: (line 1:2): unknown field "{key}"')
        if hasattr(kfp_server_api, types[key]) and isinstance(value, dict):
            known_fields(value, types[key])


def check_schedule(content: dict[str, Any]) -> None:
    if not 1 <= int(content.get("max_concurrency", 0)) <= 10:
        raise Refused(
            INVALID, "Max concurrency of a recurring run must be at least 1 and at most 10."
        )
    trigger = content.get("trigger", {})
    if cron := trigger.get("cron_schedule"):
        fields = cron.get("cron", "").split()
        if len(fields) not in (5, 6) or not all(map(CRON_FIELD.match, fields)):
            raise Refused(INVALID, "Schedule cron is not a supported format")
    elif int(trigger.get("periodic_schedule", {}).get("interval_second", 0)) < 1:
        raise Refused(INVALID, "Found invalid period schedule interval")


def task_detail(name: str, state: str, at: int) -> dict[str, Any]:
    ended = state in ("SUCCEEDED", "FAILED", "SKIPPED")
    begin = time.time() - 100 + at
    return {
        "display_name": name,
        "task_id": name,
        "state": state,
        "create_time": stamp(begin),
        "start_time": stamp(begin) if state != "PENDING" else stamp(0),
        "end_time": stamp(begin + 4) if ended else stamp(0),
        # As on a real server, a step names the pods of its children, and has none of its own.
        "child_tasks": [{"task_id": f"{name}-1", "pod_name": f"{name}-pod"}],
    }


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def now() -> str:
    return stamp(time.time())


@contextlib.contextmanager
def serving(kfp: Kfp | None = None, port: int = 0) -> Iterator[Kfp]:
    """Run the server on a port of this machine; 0 means any free one."""
    kfp = kfp or Kfp()

    class Handler(http.server.BaseHTTPRequestHandler):
        def respond(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if "multipart" in (kind := self.headers.get("Content-Type", "")):
                body = kind.encode() + b"\r\n\r\n" + body
            kfp.requests.append((self.command, url.path))
            kfp.headers.append(dict(self.headers))
            try:
                self.refuse_if_told(url.path)
                content, status = kfp.answer(self.command, url.path, query, body), 200
                kfp.lose_if_told(f"{self.command} {url.path}")
            except Refused as refused:
                status = refused.status
                said = {"error": str(refused), "code": refused.code, "message": str(refused)}
                content = {**said, "details": []}
            plain = isinstance(content, str)
            body = content if isinstance(content, str) else json.dumps(content)
            kind = "text/html" if body.startswith("<") else "text/plain"
            self.reply(status, body.encode(), kind if plain else "application/json")

        def refuse_if_told(self, path: str) -> None:
            if kfp.token and self.headers.get("Authorization") != f"Bearer {kfp.token}":
                raise Refused((401, 16), "Unauthenticated")
            for item in kfp.fail_next:
                if f"{self.command} {path}".startswith(item[0]):
                    kfp.fail_next.remove(item)
                    raise Refused((item[1], 14), "told to fail")

        def reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = respond  # noqa: N815  the names that http.server calls

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        kfp.address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield kfp
        finally:
            server.shutdown()
