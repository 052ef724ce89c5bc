"""Sessions of agents: which tokens their conversations consist of, and the training rows that these make."""
