"""Settings, messages, errors and small shared types; no torch."""
