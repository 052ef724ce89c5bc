"""Reports what an engine does: stat loggers, tracing spans and progress bars."""
