"""A short hash of facts that two engines compare: equal parts give equal hashes."""

import hashlib


def short_hash(*parts: str | bytes) -> str:
    """Return sixteen hex digits. The hash covers the ends of the parts as well."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:16]
