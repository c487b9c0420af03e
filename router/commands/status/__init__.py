"""disagg-router status: `reading` parses a router's metrics, `command` shows them."""
