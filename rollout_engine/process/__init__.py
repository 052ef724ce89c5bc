"""Runs a core in a process of its own: how it starts, the socket to it, and the messages on that socket."""
