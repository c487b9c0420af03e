"""Which vLLM this adapter knows; on another it refuses in one line."""

from vllm import __version__ as vllm_version

SUPPORTED = ("0.32",)


def require_supported_version() -> None:
    """Raises RuntimeError where the interface was not tested."""
    release = ".".join(vllm_version.split(".")[:2])
    if release not in SUPPORTED:
        raise RuntimeError(
            f"engine_ext supports vLLM {', '.join(SUPPORTED)}, this is vLLM {vllm_version}"
        )
