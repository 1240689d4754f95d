"""Turn raw sources into checked, split and packed data."""
