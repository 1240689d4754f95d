"""The program, one a node, that runs the ranks of an attempt and tells how they fare."""
