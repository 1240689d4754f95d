"""Turn text and chats into tokens, for data preparation and for models."""
