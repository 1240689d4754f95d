"""Tables with texts, images and other columns, each record with one class."""
