"""A running fleet: its client, its replicas and the changes that reach all of them."""
