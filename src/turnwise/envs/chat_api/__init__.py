"""OpenAI's chat format: what clients send, as messages, and replies as clients read them."""
