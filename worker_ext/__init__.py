"""Methods of a worker that are called by name: the stock extensions, and the base class of your own (`base`)."""
