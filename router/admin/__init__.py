"""What operators may change while the router runs, and how they see what came of it."""
