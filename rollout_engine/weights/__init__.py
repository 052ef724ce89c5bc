"""The live weights of a worker and the transactions that replace them."""
