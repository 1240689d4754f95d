"""One page that explains what happened in a run."""
