"""Rollouts to look at: in a page, and in a terminal."""
