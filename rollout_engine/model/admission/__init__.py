"""The load-time gate: decides whether an architecture can be served, by its computation."""
