"""The command `disagg-router plan`: how many engines a trace of requests needs."""
