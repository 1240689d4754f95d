"""What broke, what to do about it, and the record of both."""
