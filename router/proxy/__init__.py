"""The life of one client request.

`dispatch.serve` is the entrance: it reads a request, plans it, runs it and records it. Start
reading at `strategies`, which has one function for each way to answer: pull, push, decode_only and
decode_first.

* Before a strategy runs: `request` reads the client's body; `key_limits` and `admission` may refuse
  it or let it wait; `RouteFinder` (gateway) finds engines, and `plan` chooses the strategy.
* While it runs: `Run` (run) is the state of the request, and its file names the next engine.
  `legs` sends the leg (`messages` writes it) and judges the answer (`answer_check`), and
  `relay` passes the answer to the client. `hedging` sends one leg to several engines.
* After a failure: `retry.decide` returns what follows, `recovery` does it. `resume` lets another
  engine continue an answer, `release` frees KV that no engine will read.
* `kv_params` holds the kv_transfer_params of a leg; `loans` names engines from whose prefix caches
  a leg's engine may read.
* `Gateway` (gateway) is what all requests share. `Exchange` (exchange) is the client's connection
  as this room sees it; `CorsExchange`, `heartbeat` and `key_limits` wrap it.
"""
