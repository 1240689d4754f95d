"""The objects of a design in what `steadytrain plan --json` prints."""

from __future__ import annotations

import jsonschema

from steadytrain.components.plan.design import schema

PARTS = ("pipeline_config", "distributed_config", "cost_estimate", "storage")


def follows_the_schema(told):
    """Assert that the objects follow the published schema, and return them."""
    published, parts = schema(), {name: told[name] for name in PARTS}
    whole = {"type": "object", "$defs": published["$defs"], "required": list(PARTS)}
    properties = {name: published["properties"][name] for name in PARTS}
    jsonschema.validate(parts, {**whole, "properties": properties, "additionalProperties": False})
    return parts
