"""The classes that users hold: `LLM`, `LLMEngine` and `AsyncLLM`, each over any `EngineClient`."""
