"""Reuse, across the turns of a conversation, of the KV that a decode engine retains.

When a turn ends, its decode engine may retain the KV and report how to read it. `Conversations`
stores this report as an `Entry`; the next turn takes the entry, and its prefill engine reads the
retained KV instead of computing it. What the other rooms use:

* `conversations.Conversations` finds a request's turn, recalls the entry and keeps a new one;
* `entry` has what is stored: prompts as digests, so that two turns can be compared, and `Entry`;
* `reuse.find_reuse` decides how much of an entry the next prompt may use, and at which engines;
* `store.Store` is the interface of `MemoryStore`, `RedisStore`, and `SignedStore`, which wraps the
  latter;
* `stored_responses.ResponseStore` keeps responses for `previous_response_id`.
"""
