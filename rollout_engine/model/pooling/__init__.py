"""Pooling: hidden states of prompts, or the outputs of a head for them, as results of requests."""
