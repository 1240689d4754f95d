"""One page that tells what happened."""
