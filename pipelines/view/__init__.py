"""Live views of runs, for a terminal and for a browser. They only read."""
