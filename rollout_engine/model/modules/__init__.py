"""Hugging Face modules, as both backends see them: their construction, structure, formulas and attention."""
