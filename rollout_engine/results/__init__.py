"""Gathers the outputs of the core's steps into one `RequestOutput` per request."""
