"""What engines had counted when they were about to end, and what must be true of it after a day of
work."""

from tests.integration.nursery import Counts

# Of an engine that had time to end whatever it had begun.
ZERO = ("num_running", "num_waiting", "num_blocks_delayed", "leases_active", "leases_expired")
# No KV was lost or doubted. Of a prefill engine this may be: a turn's decode engine had gone.
ZERO_OF_DECODE = (
    "pulls_failed",
    "pulls_refused",
    "pushes_missed",
    "reads_unproven",
    "loads_corrupted",
    "confirmations_late",
)


def lost_by_prefill(counts: Counts, given_up: int = 0) -> list[str]:
    """A line for each promise that was not kept: all KV that was offered has been read, or that of
    at most so many requests `given_up` by somebody who said so."""
    found = _never(counts, *ZERO, "confirmations_late")
    granted, released = counts["leases_granted"], counts["leases_released"]
    revoked = counts["leases_revoked"]
    if granted != released + revoked or revoked > given_up:
        found.append(f"{granted} leases granted, {released} released and {revoked} revoked")
    return found + _blocks(counts)


def lost_by_decode(counts: Counts) -> list[str]:
    """The KV of all prompts came from elsewhere but for their last tokens. A turn that was kept for
    a next one may be given up when the engine leaves."""
    found = _never(counts, *ZERO, *ZERO_OF_DECODE)
    computed, loads = counts["prompt_tokens_computed"], counts["pulls_ok"]
    loads += counts["pushes_received"]
    if computed > loads:
        found.append(f"{computed} tokens computed after {loads} loads")
    return found + _blocks(counts)


def _never(counts: Counts, *names: str) -> list[str]:
    return [f"{name} is {counts[name]}" for name in names if counts[name]]


def _blocks(counts: Counts) -> list[str]:
    free, all_of_them = counts["num_blocks_free"], counts["num_blocks_total"]
    return [] if free == all_of_them else [f"{free} of {all_of_them} blocks are free"]
