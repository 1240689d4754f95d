"""Functions that build a pipeline, with the pipelines' parameters in the form that KFP reads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from kfp import dsl

from steadytrain.components.shared.config.parameters import PARAMETERS

Build = Callable[[Mapping[str, Any], str], None]
"""Adds a pipeline's steps. Takes the parameters of the steps that resolve the configuration, and
the name of the volume's claim."""
_SIGNATURE = Signature(
    [
        Parameter(
            item.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=item.default,
            annotation=type(item.default),
        )
        for item in PARAMETERS
    ],
    return_annotation=None,
)


def with_parameters(build: Build) -> Callable[..., None]:
    """Return a function with a signature and a docstring that describe PARAMETERS.

    KFP reads both with `inspect`. A component's parameters cannot be written this way: KFP sends
    the source of its function to the pod, and reads the annotations there.
    """

    @functools.wraps(build)
    def pipeline(*values: Any, **named: Any) -> None:
        given = _SIGNATURE.bind(*values, **named)
        given.apply_defaults()
        parameters = {**given.arguments, "job": dsl.PIPELINE_JOB_ID_PLACEHOLDER}
        build(parameters, parameters.pop("volume"))

    described = "\n".join(f"    {item.name}: {item.description}" for item in PARAMETERS)
    pipeline.__doc__ = f"{inspect.getdoc(build)}\n\nArgs:\n{described}"
    vars(pipeline)["__signature__"] = _SIGNATURE
    return pipeline
