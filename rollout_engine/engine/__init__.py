"""The engine: one driver of the core, its verbs, clients that call them, and the faces users see."""
