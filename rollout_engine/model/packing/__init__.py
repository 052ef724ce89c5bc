"""Packed copies of weights that products multiply by, and their replacement in one swap."""
