"""Sampling on the host, with the options of requests: logit edits, truncation, log-probs."""
