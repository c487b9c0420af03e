"""The command `disagg-router bench`: a bounded load of chats, and what its clients saw."""
