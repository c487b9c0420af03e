"""Writes the table of vLLM's names in docs/development.md, from the tables of symbols."""

from __future__ import annotations

from pathlib import Path

from engine_ext.vllm.compat.vllm_symbols import PROMISED, REQUIRED
from engine_ext.vllm.optional import TIER_2

DOCUMENT = Path(__file__).parents[1] / "docs/development.md"
BEGIN = "<!-- Written by scripts/write_vllm_names.py. -->\n"
END = "<!-- End of what is written. -->\n"
FEATURES = REQUIRED + PROMISED + TIER_2


def with_table(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    """Return a row for each feature, with the objects that it uses."""
    rows = ["| feature | names |", "|---|---|"]
    for feature in FEATURES:
        # Without their modules.
        names = {f"`{one.at.partition(':')[2] or one.at}`": None for one in feature.symbols}
        rows.append(f"| `{feature.name}` | {', '.join(names)} |")
    number = len({symbol.at for feature in FEATURES for symbol in feature.symbols})
    return f"vLLM's objects, each counted once: {number}.\n\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
