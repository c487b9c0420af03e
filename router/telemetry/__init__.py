"""Telemetry: metrics, logs, the access log and traces.

A request fills in one `Record` (`record`) while it runs. `RequestMetrics.count` counts it at once;
`RecordBatches` passes records of ended requests, many together, to the access log (`logs`), the
metrics by model (`request_metrics`) and the tracer (`tracing`, `spans`). `metrics` declares all
metrics; `metrics_server` serves them from threads and merges those of several worker processes.
"""
