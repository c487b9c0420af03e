"""Which engines serve a request: pure functions and policies, without I/O and without a clock.

`route()` (route.py) chooses a group of engines, since KV moves only within a group, and orders its
prefill and decode engines by the policy of each role. The result is a `Route`. Policies go by load
(policy.py, with their interface), by session (session_affinity.py) or by cached prefix
(prefix_cache.py, from the hashes of prompt_chunks.py). A policy that learns from answers gets
`PolicyFeedback` through the route.

The gateway owns one `GroupPolicies` per role. `AdmissionQueue` (admission_queue.py) decides which
waiting request goes next; router.proxy.admission owns it. All decisions follow from their
arguments: chance comes from `RoutingQuery.turn`, and from the caller of `route()`.
"""
