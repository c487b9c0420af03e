"""Authentication by the router's own API keys, and the limits of keys.

`Authenticator` (`authenticator`) identifies a request's key and grants a `QuotaPermit` for a key
with limits. `Keyring` (`api_keys`) is the watched file of keys, `credentials` reads and removes
credentials in headers. Usage is counted in memory (`quota_ledger`) or in Redis for several routers
(`redis_quota_ledger`); `rate_limit` is the arithmetic of both.
"""
