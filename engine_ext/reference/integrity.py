class IntegrityError(RuntimeError):
    """The engine's own bookkeeping contradicts itself."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
