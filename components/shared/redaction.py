"""Recognize secrets, in one place, and control characters in text that a run wrote.

Configurations that contain a secret are rejected, and everything that is shown, logged or stored
has secrets replaced.

A secret is recognized by the prefix that its issuer has published, by the name it is assigned to,
by its position in an address, or because it is the value of an environment variable that is not
known to be harmless. It is never recognized by looking random: digests of models, data and commits
do too.

Control characters would change a terminal or a page.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote, unquote

PLACEHOLDER = "[redacted]"

_ISSUED = r"""
    \b(?:
        hf_[A-Za-z0-9]{30,} | api_org_[A-Za-z0-9]{30,}   # Hugging Face
        | A(?:KIA|SIA|BIA|CCA)[A-Z0-9]{16}\b             # AWS
        | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_[A-Za-z0-9_]{20,}
        | gl(?:pat|dt|rt|ft|cbt|ptt|imt|agent|soat|oas|ffct)-[A-Za-z0-9_.-]{16,}  # GitLab
        | AIza[A-Za-z0-9_-]{30,}                         # Google
        | ya29\.[A-Za-z0-9_-]{20,} | GOCSPX-[A-Za-z0-9_-]{20,}
        | dapi[a-f0-9]{32}(?:-\d+)?\b                    # Databricks
        | sk-[A-Za-z0-9_-]{20,}                          # several services, such as OpenAI
        | [rs]k_(?:live|test)_[A-Za-z0-9]{16,}           # Stripe
        | xox[abeoprs]-[A-Za-z0-9-]{10,} | xapp-[A-Za-z0-9-]{10,}  # Slack
        | npm_[A-Za-z0-9]{36}\b | pypi-AgE[A-Za-z0-9_-]{40,}
        | nvapi-[A-Za-z0-9_-]{30,} | dckr_pat_[A-Za-z0-9_-]{20,} | r8_[A-Za-z0-9]{30,}
        | hvs\.[A-Za-z0-9_-]{20,} | dop_v1_[a-f0-9]{64}\b
        | SG\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{40,}     # SendGrid
        | eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*  # JSON web token
        | hooks\.slack\.com/(?:services|workflows)/\S+  # webhooks
        | discord(?:app)?\.com/api/webhooks/\S+ | webhook\.office\.com/\S+
    )
    | \bBearer\ +(?P<bearer>(?=[^\s"']*\d)[A-Za-z0-9._~+/=-]{8,})
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY(?:\ BLOCK)?-----
      (?:[\s\S]*?-----END\ [A-Z\ ]*PRIVATE\ KEY(?:\ BLOCK)?-----|[\s\S]*)
"""
# https://TOKEN@host, and x://user:password@host, in which a password may contain a slash or an @.
# After host:5432/ an @ is part of a path, except in the address of a database, whose path has none.
_ADDRESS = r"""
    \b(?i:https?)://(?P<user>(?:[^\s/?\#"<>@]*+@)++)
    | \b(?i:postgres(?:ql)?|mysql|mariadb|mssql|oracle)(?:\+\w{1,40})?
      ://(?P<database>[^\s/:@"<>]{0,200}+:(?:[^\s"<>@]{0,1000}+@)++)
    | ://(?P<password>[^\s/:@"<>\[]{0,200}+:(?!\d{1,5}/)(?:[^\s"<>@]{0,1000}+@)++)
"""
# A tokenizer's own tokens, such as pad_token, are not secrets.
_TOKENS_OF_TEXT = (
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "start", "end", "image", "video", "audio",
    "boi", "eoi", "boa", "eoa", "special", "prefix", "suffix", "middle", "decoder",
)  # fmt: skip
_NAMED = (
    "password|passwd|passphrase|pwd|secrets?|credentials?|authorization|cookie"
    "|webhook(?:[_-]?url)?|connection[_-]?string|x-(?:amz|goog)-(?:signature|credential)"
    "|(?:secret|access|api|private|account)[_-]?key(?:[_-]?id)?|apikey|awsaccesskeyid|"
    + "".join(f"(?<!{word}[_.-])" for word in _TOKENS_OF_TEXT)
    + "token"
)
_NAME = re.compile(rf"(?:^|[_.\s-])(?:{_NAMED})$", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# A name and what precedes its value: password=, "password": , ["password"] = , --password.
_ASSIGNED = re.compile(r"""(?<![\w.-])([\w.-]{1,200}+)(["']?\]?\s?[=:]{1,2}\s?|(?<=[\w-])\s+)""")
_WORDS_OF_PROSE = {"token", "secret", "secrets", "credential", "credentials", "webhook"}
# Skip words such as null that stand for a value, and earlier replacements.
_VALUE = re.compile(
    r"""(?:(?:Bearer|Basic|Token)\s)?+(?!\[redacted\]|(?:none|null|true|false)\b)"""
    r"""(?:b?"(?:[^"\\]|\\.)++"|b?'(?:[^'\\]|\\.)++'|[^\s"'<>]++)""",
    re.IGNORECASE,
)
_PATTERNS = (re.compile(_ISSUED, re.VERBOSE), re.compile(_ADDRESS, re.VERBOSE))
_LOGIN = re.compile(r"[A-Za-z][\w+.-]*:(?://|\\\\)(?![/\\])(.*)@", re.DOTALL)
# http://host:5000/models/x@y, in which the host ends at the slash.
_WEB_PATH = re.compile(r"https?://(?:[\w.-]+|\[[\da-f:.]+])(?::\d{1,5})?/", re.IGNORECASE)
_SHORTEST = 8  # Of an environment variable. Shorter values also occur in ordinary text.

PUBLIC_VARIABLES = "STEADYTRAIN_PUBLIC_VARIABLES"
"""Environment variable that names further variables, separated by commas, that hold no secret."""
# Names of variables whose values everybody may see. A name such as WANDB_API_KEY is secret anyway.
_HARMLESS = re.compile(
    r"""
    _ | PATH | (?:OLD)?PWD | HOME | USER(?:NAME)? | LOGNAME | SHELL | SHLVL | MAIL | DISPLAY
    | EDITOR | VISUAL | PAGER | LANG(?:UAGE)? | TZ | TERM(?:_\w+)? | COLORTERM | LS_COLORS
    | TMP(?:DIR)? | TEMP(?:DIR)? | HOST(?:NAME|TYPE)? | CI | ENV | ENVIRONMENT | STAGE | PROJECT
    | (?:CONTAINER|NODE|POD|JOB|RUN)_(?:NAME|NAMESPACE|IP|UID|ID) | DEBIAN_FRONTEND | IS_SANDBOX
    | (?:GROUP_)?RANK | WORLD_SIZE | KUBECONFIG | TRACEPARENT | NO_PROXY | no_proxy
    | (?:LC|XDG|PYTHON|PYTEST|PIP|UV|CONDA|PYENV|VIRTUAL|MAKE|MFLAGS|OMP|MKL|KMP|OPENBLAS|BLIS|NVPL
      |TORCH|PYTORCH|CUDA|CUDNN|NVIDIA|NVTE|NCCL|GLOO|UCX|FI|PET|MASTER|LOCAL|DS|TRITON|XLA|JAX
      |TF(?!_VAR_)|KERAS|HF|TRANSFORMERS|TOKENIZERS|ACCELERATE|BNB|RAY|KUBERNETES|KFP|KF|ARGO|JOB_COMPLETION
      |JOBSET|STEADYTRAIN)(?:_?[A-Z0-9]\w*)?
    | \w+_SERVICE_(?:HOST|PORT\w*) | \w+_PORT(?:_\d+_(?:TCP|UDP)\w*)?
    | AWS_(?:(?:DEFAULT_)?REGION|PROFILE|ENDPOINT_URL(?:_\w+)?|CA_BUNDLE)
    | MLFLOW_(?:\w*_URI|RUN_ID|EXPERIMENT_(?:ID|NAME)|HTTP_\w+|DISABLE_\w+|ENABLE_\w+|SUPPRESS_\w+)
    | WANDB_(?:PROJECT|ENTITY|MODE|DIR|NAME|BASE_URL)
    | OTEL_(?:SERVICE_NAME|SDK_DISABLED|\w+_(?:ENDPOINT|PROTOCOL|TIMEOUT|COMPRESSION|SAMPLER\w*))
    """,
    re.VERBOSE,
)
_TELLING = re.compile(
    r"(?:^|_)(?:TOKENS?|KEYS?|SECRETS?|PASS\w*|PW|AUTH\w*|CRED\w*|COOKIES?|WEBHOOK|HEADERS?|DSN)(?:_|$)"
)
# Values that are no secret under any name: an address without login and path, or an IP address.
_HARMLESS_VALUE = re.compile(
    r"steadytrain|kubeflow|localhost|production|development"
    r"|(?:[a-z][a-z0-9+.-]*://)?\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?/?"
)
_IN_ADDRESS = re.compile(r"(?=[^/?#&=;,]*\d)(?=[^/?#&=;,]*[A-Za-z])[^/?#&=;,\s]{16,}")
_PAIR = re.compile(r"[^\s,;=]+=([^,;]+)")


def redact(text: str) -> str:
    """Return `text` with everything that looks like a secret replaced."""
    known = secret_values()
    if known is not None:
        text = known.sub(PLACEHOLDER, text)
    return _without_patterns(text)


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback as Python prints it, without secrets."""
    return redact("".join(traceback.format_exception(error)))


def redact_tracebacks() -> None:
    """Remove secrets from the traceback of an uncaught exception from now on."""
    sys.excepthook = lambda _, error, __: print(traceback_of(error), end="", file=sys.stderr)


def secret_values() -> re.Pattern[str] | None:
    """Return a pattern of every secret value in this process's environment; None without any."""
    public = os.environ.get(PUBLIC_VARIABLES, "")
    values = set[str]()
    for name, value in list(os.environ.items()):
        values |= _secrets_of_variable(name, value.strip(), public)
    return _any_of(frozenset(values))


def contains_secret(text: str) -> bool:
    """Return whether a text contains something like a secret, independent of this machine."""
    return _without_patterns(text) != text


@functools.lru_cache(maxsize=4096)
def names_a_secret(key: str) -> bool:
    """Return whether a field, parameter or variable with this name holds a secret."""
    return bool(_NAME.search(_CAMEL.sub("_", key)))


def login_of(address: str) -> str:
    """Return the login of an address as drivers read it, up to the last @; "" if it has none.

    A password may contain / ? or #, which otherwise end the host. After file:/// there is no login.
    """
    match = _LOGIN.match(address)
    return match[1] if match else ""


def secrets_of_address(address: str) -> set[str]:
    """Return the login and password of an address in every form that a message may show.

    The password may be shown as written, decoded, or in pieces, if a parser treats a / ? # or @ in
    it as its end.
    """
    login = login_of(address)
    user, sign, password = login.partition(":")
    if not sign:
        # A name without a password is a token in a web address. Elsewhere it is a user or a bucket.
        return {login} if login and address.lower().startswith("http") else set()
    pieces = re.split("[/?#@]", password)
    return {login, password, unquote(password), f"{user}:{pieces[0]}", *pieces} - {"", f"{user}:"}


def _without_patterns(text: str) -> str:
    for pattern in _PATTERNS:
        text = pattern.sub(_cut, text)
    return "".join(_unassigned(text))


def _unassigned(text: str) -> Iterator[str]:
    """Yield the text in parts, without values assigned to a secret's name."""
    done = 0
    for match in _ASSIGNED.finditer(text):
        if match.start() < done or not _assigns_a_secret(match):
            continue
        value = _VALUE.match(text, match.end())
        if value:
            yield text[done : match.end()]
            yield PLACEHOLDER
            done = value.end()
    yield text[done:]


def _assigns_a_secret(found: re.Match[str]) -> bool:
    name, sign = found[1], found[2].strip()
    if not sign:
        return name.startswith("--") and names_a_secret(name)
    if name.lower() in ("sig", "signature"):
        return found.string[found.start() - 1 : found.start()] in ("?", "&", ";")
    # "Unexpected token: ..." is ordinary text.
    return names_a_secret(name) and not (sign == ":" and name.lower() in _WORDS_OF_PROSE)


def _cut(found: re.Match[str]) -> str:
    """Return the match with its only matched group replaced; without groups, replace all of it."""
    group = found.lastgroup
    if group is None:
        return PLACEHOLDER
    before = found.string[found.start() : found.start(group)]
    return before + PLACEHOLDER + ("@" if found[group].endswith("@") else "")


@functools.lru_cache(maxsize=4096)
def _secrets_of_variable(name: str, value: str, public: str) -> frozenset[str]:
    """Return what must not be shown of an environment variable's value."""
    if len(value) < _SHORTEST:
        return frozenset()
    secrets = set[str]()
    if "://" in value and "@" in value and not _WEB_PATH.match(value):
        secrets |= secrets_of_address(value)
    named = names_a_secret(name) and name != "PWD"  # the working directory
    if named or not _is_harmless(name, value, public):
        if "://" in value and not named:
            secrets |= set(_IN_ADDRESS.findall(value.partition("://")[2].partition("/")[2]))
        else:
            # Headers and connection strings: user code may show one of their values alone. Logs are
            # redacted line by line.
            secrets |= {value, *_PAIR.findall(value), *value.splitlines()}
    return frozenset(item for item in map(str.strip, secrets) if len(item) >= _SHORTEST)


def _is_harmless(name: str, value: str, public: str) -> bool:
    named = _HARMLESS.fullmatch(name) and not _TELLING.search(name)
    if named or name in map(str.strip, public.split(",")):
        return True
    # Paths, one or several, are in messages everywhere, and are no secrets. Path.exists raises
    # where a value is too long for a path or may not be looked at.
    items = [item for item in value.split(os.pathsep) if item]
    exist = [os.path.lexists(item) for item in items]
    are_paths = all(there or "/" in item for item, there in zip(items, exist, strict=True))
    return (any(exist) and are_paths) or _HARMLESS_VALUE.fullmatch(value) is not None


def _forms(value: str) -> Iterator[str]:
    """Yield a value as user code may print it: plain, in an address, as Python or as JSON."""
    yield from (value, quote(value, safe=""), repr(value)[1:-1])
    yield from (json.dumps(value, ensure_ascii=escaped)[1:-1] for escaped in (True, False))


@functools.lru_cache(maxsize=8)
def _any_of(values: frozenset[str]) -> re.Pattern[str] | None:
    forms = {form for value in values for form in _forms(value)}
    # Longest first, because one value may be the start of another.
    ordered = sorted(forms, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


_CONTROL: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""The sequences with which a terminal sets colors (ECMA-48), and the other control characters."""


def without_controls(text: str) -> str:
    """Return text of several lines without colors and control characters but tab and newline."""
    return _CONTROL.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def printable(text: str) -> str:
    """Escape what cannot be encoded, and drop what controls a terminal.

    Names of files and packages are anybody's: they may have bytes that are not valid text.
    """
    return without_controls(text.encode(errors="backslashreplace").decode())


def on_one_line(text: str) -> str:
    """Return text in which each character that cannot be printed is a space."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
