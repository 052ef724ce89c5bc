"""Checks of a trainer's calls: refuses calls whose log-probs would differ from the engine's."""
