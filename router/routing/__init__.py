"""Which engine: pure functions of the fleet, without I/O."""
