"""Pictures of requests, read from data URLs, and from the hosts and directories that the server was given."""
