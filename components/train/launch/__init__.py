"""Starting the ranks of an attempt."""
