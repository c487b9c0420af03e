"""The dashboard at /ui: engines, requests and settings of a router, live in a browser.

The dashboard collects data only while it has viewers. The first viewer starts the work, the last
one ends it:

* `live_requests.LiveRequests` learns of each request of this process from `proxy`;
* `engine_reports.EnginePoller` asks engines for their KV usage and for their transfers;
* `standing_checks.run_checks` lists what the router checks all the time;
* `snapshot.SnapshotSource` makes a snapshot of this process, and `snapshot.OtherWorkers` exchanges
  snapshots with the other worker processes;
* `hub.DashboardHub` merges them four times a second and sends the changes to all viewers;
* `site.dashboard_routes` serves the event feed, and the files of `static/` that show it.
"""
