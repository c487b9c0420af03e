"""The engines that the router knows: where they are listed, and what state they are in.

Sources (sources/: flags, file, DNS, Kubernetes) list `EngineSpec`s. `EngineRegistry` (registry.py)
watches the sources, combines their lists with the operators' overrides and applies the difference
to the `Fleet` (fleet.py). The fleet owns all `Engine` objects (engine.py) and is the only place
that changes them. `Prober` (probes.py) reports to it whether engines are healthy, which models they
serve and what they are capable of (`EngineCapabilities`, capabilities.py); requests report failed
legs, which may open an engine's `CircuitBreaker`, and pairs of engines that cannot exchange KV
(`UnreachablePairs`, unreachable_pairs.py).

After each change the fleet publishes an immutable `Snapshot` of the usable engines by model and
group; each request reads one. `build_fleet_view` (views.py) describes the fleet for the admin API
and combines the views of several router processes. consistency.py logs groups that lack a role and
engines that share an id.
"""
