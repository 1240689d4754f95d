"""Everything that depends on the kind of task. Imported only where torch runs."""
