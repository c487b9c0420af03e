"""The planted error of states: a plugin of vLLM's, for one server, that reads each state from a
block which no request has. Keys and values are right."""

from engine_ext.layout import plan


def register() -> None:
    def nobodys(name: str, blocks: plan.BlockRange) -> plan.Units:
        return found(name, plan.BlockRange([plan.NULL_BLOCK]) if name == "remote" else blocks)

    found, plan.state_units = plan.state_units, nobodys
