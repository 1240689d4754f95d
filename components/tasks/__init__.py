"""Everything that depends on the kind of task. Only encoding and the registry run without torch."""
