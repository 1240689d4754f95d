"""From raw sources to checked, split and packed data."""
