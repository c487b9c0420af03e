"""Changes by operators at run time: the admin API, SIGHUP, and how they reach every process.

* `control.Control` checks a change, remembers it and publishes the new state;
* `processes.DesiredState` is that state: one value, which is always sent whole, and applied in this
  process, or over a Unix socket in each worker process (`ControlChannel` and `follow_control`);
* `api` is the HTTP API, served beside a router or on a thread of its own.
"""
