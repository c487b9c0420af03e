"""What every room may use: TLS contexts, watched files, child processes, JSON, Redis clients."""
