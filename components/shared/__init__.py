"""What every step uses: configuration, errors, events, storage, records."""
