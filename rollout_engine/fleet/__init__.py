"""A fleet: many engines behind one client. A balancer and a brain decide; providers start the engines."""
