"""What failed, how to respond, and the record of both."""
