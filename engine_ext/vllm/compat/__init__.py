"""What every feature shares: probes of vLLM's names, which features are on, and patching."""
