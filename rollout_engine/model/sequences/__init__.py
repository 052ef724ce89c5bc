"""The state of sequences that runners keep between steps."""
