"""GGUF files: their header, and a directory with its content as files that transformers reads."""
