"""disagg-router demo: `command` runs it, `engines` starts engines and routers."""
