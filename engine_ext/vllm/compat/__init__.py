"""What we touch of vLLM that it does not offer: its engine's loop, its HTTP models and
streams, its finish reasons. What our scheduler class overrides is in vllm/scheduler.py."""
