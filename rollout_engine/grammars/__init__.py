"""Structured outputs: grammars that outputs follow, compiled by llguidance, and the masks of tokens they allow."""
