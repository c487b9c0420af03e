"""disagg-router chat: `command` reads and prints, `conversation` asks the router, and `route` finds
the engines that answered."""
