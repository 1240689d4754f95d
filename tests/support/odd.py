"""Odd values for everything that a user can set, and the command line called in this process."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import typer
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from steadytrain.components.shared.config import RunConfig
from steadytrain.components.shared.errors import SteadytrainError
from steadytrain.pipelines.cli import app

COMMAND = typer.main.get_command(app)
"""Built once, because Typer rebuilds it on each call, which takes longer than most calls."""
_ALL = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
QUICK = settings(max_examples=150, derandomize=True, **_ALL)
"""Uses the same examples each time."""
LONG = settings(max_examples=20_000, derandomize=False, print_blob=True, **_ALL)

_BOMB = ["a: &a [x, x, x, x, x, x, x, x, x]"] + [
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
]
YAML_TEXTS = [
    *("", " ", "~", "null", "[]", "{}", "[[]]", "[~]", "{a: b}", "{1: 2}", "{~: 1}", "{[1, 2]: 3}"),
    *("? x", "0", "-1", "1", "2", "1e3", "1e400", "-1e400", ".nan", ".inf", "-.inf", "nan", "inf"),
    *("1" * 400, "1" * 5000, "-" + "9" * 30, "0x10", "0o17", "017", "1_000", "12:30:45", "2024"),
    *("2024-01-01", "2024-01-01T00:00:00Z", "2024-13-45", "on", "off", "yes", "true", "5e-324"),
    *("!!python/object:os.system x", "!!python/name:os.system", "!!binary aGVsbG8=", "!!binary x"),
    *("!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!timestamp x", "!!int x", "!!float x"),
    *("!!bool x", "!!null x", "!!map [a]", "!!seq {a: b}", "!!str [a]", "!foo bar", "&a [*a]"),
    *("&a {x: *a}", "&a {<<: *a}", "*a", "&a", "[1,", "{", "}", "'", '"', '"\\ud800"', '"\\0"'),
    *("\ud800", "\udcff", "\x00", "\x07", "\x1b[31m", "\u202eabc", "\U0001f600", "é" * 300),
    *("x" * 50_000, "[" * 100 + "]" * 100, "[" * 3000, "{a: " * 500 + "}" * 500, "- " * 500 + "a"),
    *("/", "/dev/null", "/dev/zero", "..", "../..", "-x", "--set", "- a", "a: b", "a: b: c", "%x"),
    *("@x", "`x`", "|", "|\n a", ">\n a", "# c", "---", "--- a\n--- b", "...", "%YAML 9.9\n--- a"),
    *("<<: a", "{<<: a}", "{<<: [1]}", "{<<: {name: x}}", "=", "{=: 1}", "s3://", "s3://b", "hub:"),
    *("hub:x", "package:", "package:..", "package:a.b", "models:/", "file:///etc/passwd"),
    *("http://[", "http://[::1", "http://a:b:c", "module:Class", "os:system", "\t", "\r\n", "a\nb"),
    *("\ufeff", "\u2028", "{" + ", ".join(_BOMB) + "}"),
]
"""Values as a user may write them, in a file or after --set."""


def plain_values() -> list[Any]:
    """Return values as a program may pass them."""
    return [
        *(None, True, -1, 0, 1, 3, 2**31, 2**63, 10**5000, 0.5, 1e308, 5e-324, float("nan")),
        *(float("-inf"), "", "x", "x" * 5000, "\0", "\ud800", "\u202eabc", "/", "s3://b/x", "a\nb"),
        *("auto", [], [[]], ["a"], [1.5], {}, {1: 2}, {"a": None}, {"a": {1, 2}}, b"\xff", (1,)),
        *(date(2024, 1, 1), object(), {"model_type": 1}),
    ]


def endless_values() -> list[Any]:
    """Return values that are circular or nested too deep."""
    circle: list[Any] = []
    circle.append(circle)
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    return [circle, {"a": circle}, deep, {"a": deep}, {"model_type": "llama", "a": [{"b": deep}]}]


def fields(section: type[BaseModel] = RunConfig, before: str = "") -> Iterator[str]:
    """Yield the dotted name of every section and field."""
    for name, field in section.model_fields.items():
        yield f"{before}{name}"
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from fields(kind, f"{before}{name}.")


FIELDS = [
    *fields(),
    *("model.config.x", "model.config.model_type.x", "data.columns.text.x", "gate.floors.loss"),
    *("gate.floors.x", "compute.pods.node_selector.a", "compute.pods.volumes.0", "", ".", "a..b"),
    *("no such", "name.x", "\udcff", "x" * 5000, "data.source.0", "training.\U0001f600", "-"),
]
ARGUMENTS = [
    *(
        "",
        " ",
        "-",
        "--",
        "-x",
        "--no-such",
        "0",
        "-1",
        "1",
        "2",
        "3",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e308",
    ),
    *(
        "9" * 30,
        "9" * 5000,
        "0x10",
        "1_0",
        "2024",
        "on",
        "null",
        "x",
        "x" * 300,
        "x" * 5000,
        "\udcff",
        "\U0001f600",
    ),
    *(
        "\u202eabc",
        "\x1b[31m",
        "\n",
        "a\nb",
        "a: [",
        "a: 1\nb: 2",
        "%s",
        "?",
        "#",
        "*",
        "[",
        "{}",
        "~",
        "~nobody",
    ),
    *(
        ".",
        "..",
        "../../x",
        "file",
        "file/x",
        "empty",
        "bytes",
        "list.yaml",
        "bad.yaml",
        "good.yaml",
        "prices.yaml",
    ),
    *(
        "schedules.yaml",
        "folder",
        "loop",
        "dangling",
        "fifo",
        "new/deep/x",
        "/dev/null",
        "/dev/full",
    ),
    *(
        "/proc/self/mem",
        "/proc/nothing/x",
        "/sys/x",
        "/dev/null/x",
        "causal-lm",
        "chat",
        "h100",
        "cpu",
        "finetune",
    ),
    *(
        "s3://",
        "s3://b/x",
        "http://[",
        "http://127.0.0.1:9",
        "http://127.0.0.1:99999",
        "ftp://x",
        "file:///x",
    ),
    *(
        "http://u:p@127.0.0.1:9",
        "training.seed=1",
        "=",
        "x=",
        "compute.nodes=7",
        "mine",
        "preprocess",
    ),
]
"""Values as a user may write them for an option or an argument, in the folder of `places`."""
argument = st.sampled_from(ARGUMENTS) | st.text(
    st.characters(exclude_characters="\0", codec="utf-8"), max_size=12
)
yaml_text = (
    st.sampled_from(YAML_TEXTS) | st.text(max_size=20) | st.text("[]{}:,&*!|>'\"%@#-? \n~a1")
)


@dataclass(frozen=True)
class Parameter:
    """An option (`name` is its flag) or an argument (`name` is "")."""

    name: str
    takes_value: bool


def commands(
    group: Any = None, before: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[Parameter]]]:
    """Yield every command of the program with its options and arguments."""
    group = group or COMMAND
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
            continue
        found = [
            Parameter("" if item.param_type_name == "argument" else item.opts[0], not item.is_flag)
            if item.param_type_name != "argument"
            else Parameter("", True)
            for item in command.params
            if item.name != "help"
        ]
        yield (*before, name), found


SECONDS = 600


def _hangs(*_: object) -> None:
    raise TimeoutError("the command hangs")


@dataclass(frozen=True)
class Ending:
    """The result of a command."""

    code: int
    out: str
    err: str


def call(*arguments: str, folder: Path) -> Ending:
    """Run the command in this process.

    Exits and our own errors become an exit code; any other exception propagates.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in _ERRORS)
    code = 0
    signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SECONDS)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
        try:
            COMMAND(list(arguments), prog_name="steadytrain")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except SteadytrainError as error:
            code = error.exit_code
            err.write(f"error: {error}\n")
        finally:
            signal.alarm(0)
    told = []
    for stream in (out, err):
        stream.flush()
        told.append(stream.buffer.getvalue().decode("utf-8", "backslashreplace"))  # type: ignore[attr-defined]
    return Ending(code, *told)


_ERRORS = ("backslashreplace", "backslashreplace")
"""The error handlers that `main` sets for the real streams."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Replace every server and cluster with an address on this machine that refuses connections."""
    before = dict(os.environ)
    nowhere = "http://127.0.0.1:9"
    os.environ.update(
        KUBECONFIG="/nonexistent",
        AWS_ENDPOINT_URL=nowhere,
        AWS_MAX_ATTEMPTS="1",
        AWS_ACCESS_KEY_ID="x",
        AWS_SECRET_ACCESS_KEY="x",
        HF_HUB_OFFLINE="1",
        KF_PIPELINES_ENDPOINT=nowhere,
    )
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
