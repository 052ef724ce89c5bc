"""The load-time gate: decides by what an architecture computes whether it can be served."""
