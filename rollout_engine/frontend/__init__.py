"""From prompts to results: text and ids in, finished completions out. Drives the core, knows nothing of the model."""
