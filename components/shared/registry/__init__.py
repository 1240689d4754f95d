"""The registered model: its versions and aliases, and the subject of a gate decision."""
