"""A short name for what two engines compare: equal parts, equal name."""

import hashlib


def short_hash(*parts: str | bytes) -> str:
    """Sixteen digits. Where a part ends counts, too."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:16]
