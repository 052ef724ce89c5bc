"""Pictures of prompts: a composite's vision tower and projector, computed exactly, and the places of its features."""
