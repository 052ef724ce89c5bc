"""The parts that all dialects of conversations share: OpenAI's chats and responses, and Anthropic's messages."""
