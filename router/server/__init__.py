"""The front door: the OpenAI endpoints, on a protocol of our own or on any ASGI server."""
