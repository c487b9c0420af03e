"""disagg-router doctor: checks a fleet, and says what to do about each fault."""
