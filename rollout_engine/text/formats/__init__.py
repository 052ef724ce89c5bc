"""Formats of answers: how model families write thinking and tool calls."""
