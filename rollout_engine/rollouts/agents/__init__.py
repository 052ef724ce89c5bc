"""Agents as environments: programs and functions that talk to the policy over HTTP, one gateway session an episode."""
