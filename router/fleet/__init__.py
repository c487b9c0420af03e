"""The engines this router knows, and whether they are alive."""
