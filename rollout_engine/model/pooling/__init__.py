"""Pooling: hidden states of prompts, or what a head computes of them, as results of requests."""
