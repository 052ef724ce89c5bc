"""Sessions over HTTP: their paths and keys, the requests of their agents, their rows."""
