"""A package that adds plugins to steadytrain."""
