"""Telemetry: metrics, logs, the access log and traces.

A request fills in one `Record` (`record`) while it runs. `RecordBatches` passes records of ended
requests, many together, to their metrics (`request_metrics`), the access log (`logs`) and the
tracer (`tracing`, `spans`). `metrics` declares the other metrics, of types in `metric_types`;
`metrics_server` serves them from threads and merges those of several worker processes.
"""
