"""Authentication by the router's own API keys, and the limits of keys.

`Authenticator` (`authenticator`) identifies a request's key and grants a `QuotaPermit` for a key
with limits. `api_keys` reads and removes keys in headers, and has the watched file of keys
(`Keyring`). Usage is counted in memory (`quota_ledger`) or in Redis for several routers
(`redis_quota_ledger`).
"""
