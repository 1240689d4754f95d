"""A registry with versions that were trained on data, but without actual models."""

from __future__ import annotations

import shutil

import pytest

from steadytrain.components.preprocess.inputs import find_inputs
from steadytrain.components.shared.config import from_mapping
from steadytrain.components.shared.registry import INPUTS, Registry
from steadytrain.components.shared.workspace import Workspace

from support.stores import empty_store

__all__ = ["empty_store"]


@pytest.fixture
def config(tmp_path, empty_store):
    """A configuration with one text file as its data and an empty registry."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("the first text\n")
    content = {"name": "tiny", "output": str(tmp_path / "output")}
    content["data"] = {"source": [str(tmp_path / "data")], "format": "text"}
    content["model"] = {"config": {"model_type": "llama"}}
    made = from_mapping(content)
    store = Workspace.of(made).tracking_store
    store.parent.mkdir(parents=True)
    shutil.copyfile(empty_store, store)
    return made


@pytest.fixture
def learned(config):
    """Register a version that was trained on the current data."""

    def register(*aliases, tags=None):
        registry = Registry(config, Workspace.of(config))
        client = registry.tracking.client
        if not client.search_registered_models():
            client.create_registered_model(registry.name)
        tags = {INPUTS: find_inputs(config.data).digest()} if tags is None else tags
        version = client.create_model_version(registry.name, "nowhere", tags=tags).version
        for alias in aliases:
            client.set_registered_model_alias(registry.name, alias, version)

    return register
