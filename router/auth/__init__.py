"""Who asks, by the router's own API keys, and how much each may ask."""
