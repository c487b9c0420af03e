"""The formats of requests and answers: OpenAI's, and other dialects that are translated to it.

`errors` has every error that a client can receive; `fastapi_errors` installs the handlers for them.
`request_fields` finds invalid fields before an engine works on a request. `answers` reads what
engines send. `responses` (OpenAI's Responses) and `anthropic_messages` translate to chat
completions and back; `dialects` has what they share. Nothing here does I/O.
"""
