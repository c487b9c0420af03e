"""The front door: the OpenAI endpoints, on uvicorn's protocol or on any ASGI server."""
