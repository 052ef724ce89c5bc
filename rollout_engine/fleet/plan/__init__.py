"""Decisions of a fleet: plain Python, without threads, sockets or clocks."""
