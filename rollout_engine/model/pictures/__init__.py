"""Pictures of prompts: a composite's vision tower and projector, computed exactly, and where its features stand."""
