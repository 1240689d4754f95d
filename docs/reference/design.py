"""The objects of a design with their fields, from the models, and their JSON Schema."""

from __future__ import annotations

import json
from typing import Any

from reference.markdown import code, table

from steadytrain.components.plan.design import schema


def page() -> str:
    """A table for each object, and the schema."""
    found = schema()
    parts = {"Design": found, **found["$defs"]}
    lines = [
        "# Designs",
        "",
        "`steadytrain design --json` prints an object of this form. `steadytrain plan --json` has "
        "`pipeline_config`, `distributed_config`, `cost_estimate` and `storage` besides its own "
        "fields. `steadytrain schema --design` prints the schema below, and `steadytrain schema "
        "--plan` that of a plan.",
    ]
    for name, part in parts.items():
        rows = [
            (code(field), code(_kind(item)), item.get("description", ""))
            for field, item in part["properties"].items()
        ]
        lines += ["", f"## {name}", "", part.get("description", ""), ""]
        lines.append(table(("Field", "Type", "Meaning"), rows))
    return "\n".join(
        [*lines, "", "## Schema", "", "```json", json.dumps(found, indent=2), "```", ""]
    )


def _kind(item: dict[str, Any]) -> str:
    if "$ref" in item:
        return str(item["$ref"]).rpartition("/")[2]
    if "anyOf" in item:
        return " or ".join(map(_kind, item["anyOf"]))
    if "enum" in item:
        return " or ".join(item["enum"])
    if "const" in item:
        return str(item["const"])
    kind = str(item["type"])
    return f"{kind} of {_kind(item['items'])}" if "items" in item else kind
