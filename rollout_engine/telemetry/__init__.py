"""Reports on an engine's work: stat loggers, tracing spans and progress bars."""
