"""Images: each with one class, in folders or named by a table."""
