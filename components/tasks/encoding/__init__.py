"""Turn records into rows: an encoder for each task, and tokens of texts and chats."""
