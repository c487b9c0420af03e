"""The command `disagg-router drill`: streams of its own while an engine drains, freezes or dies."""
