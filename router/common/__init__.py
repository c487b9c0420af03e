"""Utilities for all packages: TLS contexts, watched files, child processes, JSON, Redis clients."""
