"""The page at /ui: what a router sees, told to who looks; nothing is gathered while nobody does."""
