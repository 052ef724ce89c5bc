"""Running the model for the core: worker, executor, extensions."""
