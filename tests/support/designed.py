"""The objects of a design in what `steadytrain plan --json` prints."""

from __future__ import annotations

import jsonschema

from steadytrain.components.plan.design import schema_of_plans


def follows_the_schema(told):
    """Assert that a plan follows the published schema, and return what it has of a design."""
    published = schema_of_plans()
    jsonschema.validate(told, published)
    return {name: told[name] for name in published["properties"]}
