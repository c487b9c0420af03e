"""disagg-router demo: engines and a router on this machine, to see it work."""
