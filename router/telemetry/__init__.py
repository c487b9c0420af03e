"""What operators see: metrics, the access line, log formats."""
