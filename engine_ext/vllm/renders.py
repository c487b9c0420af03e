"""What two engines must share to read token ids alike and to render messages alike, as short
hashes: one goes on with what the other began only where they are equal."""

import json
import logging
from pathlib import Path
from typing import Any

from engine_ext.common.short_hash import short_hash

logger = logging.getLogger(__name__)

SAMPLES = 64
SAMPLE_BYTES = 4096
HERE_ONLY = ("_name_or_path", "transformers_version")
"""Fields of a model's configuration that depend on where this engine has it from."""


def renders(state: Any) -> dict[str, str]:
    """Return the hashes of an HTTP server of vLLM's, by its `app.state`; empty if they cannot be
    found out, so that no router relies on them. Blocks: files are read."""
    try:
        return _renders(state)
    except Exception:
        logger.exception("what this engine renders with")
        return {}


def _renders(state: Any) -> dict[str, str]:
    config, online = state.vllm_config.model_config, state.online_renderer
    tokenizer = online.renderer.tokenizer
    special = json.dumps(getattr(tokenizer, "special_tokens_map", {}), sort_keys=True, default=str)
    template = online.chat_template or getattr(tokenizer, "chat_template", None)
    kwargs = json.dumps(online.default_chat_template_kwargs, sort_keys=True, default=str)
    return {
        "model": _model(config),
        "tokenizer": short_hash(special, _tokens(tokenizer)),
        "chat_template": short_hash(special, json.dumps(template, default=str), kwargs),
    }


def _model(config: Any) -> str:
    named = config.hf_config.to_dict()
    shared = {key: named[key] for key in sorted(named.keys() - set(HERE_ONLY))}
    directory = Path(str(config.model))
    parts: list[str | bytes] = [json.dumps(shared, sort_keys=True, default=str)]
    for path in sorted(directory.glob("*.safetensors")):
        parts += [path.name, *_samples(path)]
    if len(parts) == 1:
        # From a hub: its name and revision say which weights they are.
        parts.append(f"{config.model} {config.revision}")
    return short_hash(*parts)


def _samples(path: Path) -> list[bytes]:
    """Return parts of a file of many gigabytes."""
    size = path.stat().st_size
    found = [size.to_bytes(8, "little")]
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(size * number // SAMPLES)
            found.append(file.read(SAMPLE_BYTES))
    return found


def _tokens(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        whole: str = backend.to_str()
        return whole
    return json.dumps(sorted(tokenizer.get_vocab().items()))
