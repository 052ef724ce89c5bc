"""OpenAI's dialect, with the fields that vLLM added to it."""
