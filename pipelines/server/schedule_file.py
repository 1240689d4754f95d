"""Recurring runs as a file declares them, and their times: cron in a time zone, as KFP reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, AwareDatetime, Field, ValidationError, model_validator

from steadytrain.components.shared.config import RunConfig, from_mapping
from steadytrain.components.shared.config.document import find_unfit, parse, read, shortened
from steadytrain.components.shared.config.secrets import find_secrets, redact
from steadytrain.components.shared.effects import Section, at_odds
from steadytrain.components.shared.errors import BadInput, ConfigError, Problem
from steadytrain.pipelines.pod_names import Pipeline
from steadytrain.pipelines.searches import configuration_for

Rounding = Literal["standard", "summer"]

_DAY: Final = 24 * 60
_MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
_DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
_PART = re.compile(r"(?P<first>\*|\?|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?")


@dataclass(frozen=True)
class _Field:
    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()

    def values(self, text: str) -> frozenset[int]:
        """Return the numbers that a field's text stands for.

        Raises:
            ValueError: the text is not valid; the message says why.
        """
        return frozenset(number for part in text.split(",") for number in self._part(part))

    def text(self, values: Iterable[int]) -> str:
        texts = sorted(values)
        every = len(texts) == self.high - self.low + 1
        return "*" if every else ",".join(map(str, texts))

    def _part(self, part: str) -> range:
        match = _PART.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r} is not a valid {self.name}")
        first, last, step = match["first"], match["last"], int(match["step"] or 1)
        if first in "*?":
            low, high = self.low, self.high
        else:
            low = self._number(first)
            # Like robfig/cron, which KFP uses: 5/15 goes from 5 to the end.
            high = self._number(last) if last else self.high if match["step"] else low
        if high < low or step < 1:
            raise ValueError(f"{part!r} goes backwards")
        return range(low, high + 1, step)

    def _number(self, text: str) -> int:
        if text.upper() in self.names:
            return self.names.index(text.upper()) + self.low
        if not text.isdecimal() or not self.low <= int(text) <= self.high:
            raise ValueError(f"{text!r} is not a valid {self.name} ({self.low} to {self.high})")
        return int(text)


_FIELDS = (
    _Field("second", 0, 59),
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, tuple(_MONTHS)),
    _Field("day of the week", 0, 6, tuple(_DAYS)),
)


def six_fields(cron: str) -> list[str]:
    """Return the six fields of a cron. Five fields get the second 0.

    Raises:
        ValueError: the cron is not valid; the message names the field.
    """
    fields = cron.split()
    fields = ["0", *fields] if len(fields) == 5 else fields
    if len(fields) != 6:
        raise ValueError("give five fields (minute, hour, day, month, weekday), or six: seconds")
    for field, text in zip(_FIELDS, fields, strict=True):
        field.values(text)
    return fields


def zone(name: str) -> ZoneInfo:
    """Return a time zone by its IANA name.

    Raises:
        ValueError: there is no such zone.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"{name!r} is not a time zone, such as UTC or Europe/Berlin") from error


def ahead(here: ZoneInfo, server: ZoneInfo, rounding: Rounding | None) -> int:
    """Return how many minutes a zone is ahead of the server's, all year round.

    Args:
        rounding: which difference to use if it changes within the year. "standard" means the
            smaller one, which is that of standard time if the server's zone has no daylight saving.
            "summer" means the larger one.

    Raises:
        ValueError: the difference changes, and `rounding` is None.
    """
    today = datetime.now(UTC)
    days = [today + timedelta(days=number) for number in range(370)]
    offsets = {int(_offset(here, day) - _offset(server, day)) for day in days}
    if len(offsets) > 1 and rounding is None:
        raise ValueError(
            f"{here.key} has daylight saving, and the server's {server.key} does not follow it"
        )
    return max(offsets) if rounding == "summer" else min(offsets)


def in_server_time(cron: str, minutes_ahead: int) -> str:
    """Convert a cron to the server's zone, in six fields.

    Raises:
        ValueError: no single cron has the same meaning there; the message says why.
    """
    fields = six_fields(cron)
    if not minutes_ahead:
        return " ".join(fields)
    minutes, hours, days, months, weekdays = (
        field.values(text) for field, text in zip(_FIELDS[1:], fields[1:], strict=True)
    )
    moved = [divmod(60 * h + m - minutes_ahead, _DAY) for h in hours for m in minutes]
    times = {time for _, time in moved}
    moved_hours, moved_minutes = {time // 60 for time in times}, {time % 60 for time in times}
    if len(moved_hours) * len(moved_minutes) != len(times):
        raise ValueError("in the server's zone its minutes differ from hour to hour")
    shifts, any_day = {shift for shift, _ in moved}, len(weekdays) == 7 and len(days) == 31
    if shifts != {0} and not (any_day and len(months) == 12):
        if len(shifts) > 1 or len(days) < 31 or len(months) < 12:
            raise ValueError("in the server's zone it falls on other days")
        weekdays = frozenset((day + min(shifts)) % 7 for day in weekdays)
        fields[5] = _FIELDS[5].text(weekdays)
    fields[1], fields[2] = _FIELDS[1].text(moved_minutes), _FIELDS[2].text(moved_hours)
    return " ".join(fields)


def _offset(here: ZoneInfo, moment: datetime) -> float:
    offset = moment.astimezone(here).utcoffset() or timedelta()
    return offset.total_seconds() / 60


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SHORTEST_SECONDS = 60

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]


def _known_zone(name: str) -> str:
    return zone(name).key


def _valid_cron(cron: str) -> str:
    six_fields(cron)
    return cron


def _valid_interval(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[smhd]", text):
        raise ValueError("give a whole number and s, m, h or d, such as 6h")
    if _seconds(text) < _SHORTEST_SECONDS:
        raise ValueError(f"shorter than {_SHORTEST_SECONDS} s")
    return text


Zone = Annotated[str, AfterValidator(_known_zone)]


class Schedule(Section):
    """One recurring run."""

    name: Name = Field(..., description="Name of the schedule, unique in its file.")
    description: str = Field("", description="Description shown on the server.")
    config: str | dict[str, Any] = Field(
        ...,
        description="A preset, a file (relative to the schedule file), or the configuration "
        "itself.",
    )
    overrides: dict[str, Any] = Field(
        default={}, description="Fields to override, such as training.max_steps: 100."
    )
    pipeline: Pipeline = Field(
        "retrain",
        description="Pipeline to run. retrain ends early if there is no new data; finetune trains "
        "every time; tune searches for better settings, and trains the winner.",
    )
    cron: Annotated[str, AfterValidator(_valid_cron)] | None = Field(
        None,
        description="Minute, hour, day, month and weekday, or six fields with seconds first. "
        "None means that interval sets the times.",
    )
    time_zone: Zone | None = Field(
        None, description="Time zone of cron, such as UTC or Europe/Berlin. Required with cron."
    )
    daylight_saving: Rounding | None = Field(
        None,
        description="Which time to follow if the zone has daylight saving. standard: standard "
        "time, an hour later by the clock in summer; summer: summer time, an hour earlier by the "
        "clock in winter. None works only if the difference from the server's zone never changes.",
    )
    interval: Annotated[str, AfterValidator(_valid_interval)] | None = Field(
        None,
        description="Time between runs, such as 6h, counted from start or, without one, from "
        "creation. None means that cron sets the times.",
    )
    start: AwareDatetime | None = Field(
        None, description="Earliest time of a run. None means right away."
    )
    end: AwareDatetime | None = Field(None, description="Latest time of a run. None means no end.")
    catch_up: bool = Field(False, description="Run missed times later, one after the other.")
    max_concurrency: int = Field(
        1, ge=1, le=10, description="Maximum number of runs at the same time."
    )
    pipeline_root: str = Field(
        "", description="Where KFP stores artifacts. Empty means the server's default."
    )
    service_account: str = Field(
        "", description="Service account of the runs' pods. Empty means the server's default."
    )

    @model_validator(mode="after")
    def _one_trigger(self) -> Self:
        if (self.cron is None) == (self.interval is None):
            raise at_odds(
                "cron",
                self.cron,
                "exactly one of cron and interval must be set",
                "give one of the two",
            )
        if (self.cron is None) != (self.time_zone is None):
            raise at_odds(
                "time_zone",
                self.time_zone,
                "cron needs one, since the server's may differ; an interval must not have one",
                "set time_zone, such as UTC" if self.cron else "leave it out",
            )
        if self.start and self.end and self.end <= self.start:
            raise at_odds("end", self.end.isoformat(), "is not after start", "give a later one")
        return self

    @property
    def interval_seconds(self) -> int:
        """The interval in seconds; 0 means that cron sets the times."""
        return _seconds(self.interval) if self.interval else 0


class ScheduleFile(Section):
    """Schedules that are applied together. A file owns the server's schedules with its name."""

    name: Name = Field(
        ...,
        description="Name of the set of schedules. Schedules removed from the file are deleted "
        "from the server.",
    )
    experiment: str = Field("steadytrain", description="KFP experiment of the runs.")
    server_time_zone: Zone = Field(
        "UTC", description="Time zone in which the server interprets cron."
    )
    schedules: list[Schedule] = Field(..., description="The recurring runs.")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [schedule.name for schedule in self.schedules]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise at_odds(
                    f"schedules.{index}.name", name, "is taken in this file", "give another one"
                )
        return self

    @model_validator(mode="after")
    def _check_crons(self) -> Self:
        for index, schedule in enumerate(self.schedules):
            try:
                self.cron(schedule)
            except ValueError as error:
                saving = "daylight saving" in str(error)
                raise at_odds(
                    f"schedules.{index}.{'time_zone' if saving else 'cron'}",
                    schedule.time_zone if saving else schedule.cron,
                    str(error),
                    "set daylight_saving to standard or summer, or use a zone without it"
                    if saving
                    else "split it into several schedules, or write it in the server's zone "
                    f"{self.server_time_zone}",
                ) from error
        return self

    def cron(self, schedule: Schedule) -> str | None:
        """Return a schedule's cron in the server's zone, in six fields; None for an interval."""
        if schedule.cron is None or schedule.time_zone is None:
            return None
        here, server = zone(schedule.time_zone), zone(self.server_time_zone)
        return in_server_time(schedule.cron, ahead(here, server, schedule.daylight_saving))


def read_schedules(path: Path) -> ScheduleFile:
    """Read a file of schedules.

    Raises:
        BadInput: the file does not exist, or is not a YAML mapping.
        ConfigError: with every problem in the file.
    """
    text = read(path, str(path), "give the path of a YAML file of schedules")
    content = parse(text, str(path))
    if not isinstance(content, dict):
        raise BadInput(f"{path} is not a mapping", remedy="start with name: and schedules:")
    if unfit := list(find_unfit(content)):
        raise ConfigError(unfit)
    problems = list(find_secrets(content))
    try:
        declared = ScheduleFile.model_validate(content)
    except ValidationError as error:
        problems += _problems(error)
    if problems:
        raise ConfigError(problems)
    return declared


def configuration(schedule: Schedule, folder: Path) -> RunConfig:
    """Return the configuration of a schedule's runs.

    Args:
        folder: the folder of the schedule file; paths are relative to it.

    Raises:
        ConfigError: with every problem in the configuration.
    """
    source = schedule.config
    if isinstance(source, dict):
        automl = schedule.pipeline == "automl"
        source = json.dumps(source) if automl else from_mapping(source).to_yaml()
    elif (folder / source).is_file():
        source = str(folder / source)
    return configuration_for(schedule.pipeline, source, schedule.overrides)[0]


def _problems(error: ValidationError) -> Iterator[Problem]:
    for item in error.errors(include_url=False):
        # For a field with several types, pydantic adds a part for the type that it tried last.
        location = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
        value = shortened(redact(repr(item.get("input"))))
        message, remedy = item["msg"].removeprefix("Value error, "), "change it"
        if item["type"] == "at_odds":
            context = item["ctx"]
            within = [] if str(context["field"]).startswith("schedules.") else location
            location, value = [*within, context["field"]], redact(str(context["value"]))
            message, remedy = context["message"], context["remedy"]
        elif item["type"] == "missing":
            value, message, remedy = "(missing)", "is required", f"set {'.'.join(location)}"
        elif item["type"] == "extra_forbidden":
            known = Schedule if "schedules" in location else ScheduleFile
            message, remedy = "no such field", f"one of {', '.join(known.model_fields)}"
        yield Problem(".".join(location), value, message, remedy)


def _seconds(interval: str) -> int:
    return int(interval[:-1]) * _UNITS[interval[-1]]
