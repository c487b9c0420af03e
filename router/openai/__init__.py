"""Other ways to ask for a chat completion: translated there and back, unknown to the flows."""
