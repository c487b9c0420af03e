"""Telemetry: metrics, logs, the access log and traces.

A request fills in one `Record` (`record`) while it runs. `Metrics.finish` counts it at once;
`RecordBatches` passes records of ended requests, many together, to the access log (`access_log`),
the metrics by model (`model_metrics`) and the tracer (`trace_export`). `logs` sets up logging and
has a throttle for repeated warnings. `liveness` serves metrics from a thread, `worker_metrics`
merges those of several worker processes.
"""
