"""A fleet of engines that computes nothing, to compare policies: see scripts/simulate_fleet.py."""
