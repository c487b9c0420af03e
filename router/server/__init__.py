"""HTTP towards clients.

`app.build` makes the FastAPI application, and all that it needs, from the settings. `serve.run`
serves it in this process, `supervisor.run` in several. Both run uvicorn with RouterProtocol
(`client_connection`), which passes requests for engines to `router.proxy` and all others to the
application.
"""
