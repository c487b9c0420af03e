"""disagg-router demo: `command` runs it, `engines` has the engines and the model that it starts."""
