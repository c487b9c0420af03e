"""The command `disagg-router status`: what a router sees of its fleet, for people and scripts."""
