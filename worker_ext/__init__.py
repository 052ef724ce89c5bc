"""What a worker answers by name beside computing steps: stock extensions, and the base of your own (`base`)."""
