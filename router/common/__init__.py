"""Utilities for all packages: deadlines, TLS, watched files, child processes, JSON, Redis."""
