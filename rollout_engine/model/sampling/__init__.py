"""Sampling on the host, and what requests may ask for: logit edits, truncation, log-probs."""
