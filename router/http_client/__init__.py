"""HTTP/1.1 towards engines: connections, requests and answers as bytes.

One `EnginePool` (pool.py) belongs to each engine: it keeps the connections to it.
`pool.request()` sends a request and returns an `EngineAnswer` (engine_answer.py) as soon as there
is something to act on; `pool.fetch()` returns a small answer whole. The caller owns the answer: it
reads or relays the body and must close it. Closing an unfinished answer closes its connection.

Every failure is an `UpstreamError` (errors.py), whose subclass identifies the failure and whether
the engine is to blame. Nothing here retries a request of a client: the caller decides that.

connecting.py opens a connection; an `EngineConnection` (pool.py) parses its bytes, but for most
heads, which head_cache.py knows. `Deadlines` (router.common) serves all timeouts with one timer,
and a `MemoryBudget` (answer_limits.py) bounds the memory of all answers that are held whole.
`SseReader` (sse.py) is the router's only reader of server-sent events.
"""
