"""What two engines must agree on before one may use the other's KV.

Equal architecture is not enough: KV of other weights loads without complaint and answers nonsense.
Hashing all weights would take minutes for a real model, so each safetensors file counts with its
size, its header (names, shapes, offsets) and a sample of its bytes.
"""

import hashlib
import json
import struct
from pathlib import Path

from engine_ext.common.short_hash import short_hash
from engine_ext.reference.model_config import ModelConfig
from engine_ext.reference.tokenizer import Tokenizer, chat_template_source

SAMPLES = 64
SAMPLE_BYTES = 4096


def model_factors(directory: Path, config: ModelConfig) -> dict[str, str]:
    """Factors of the compatibility hash, each readable by the operator who meets a mismatch."""
    return {
        "architecture": config.architecture,
        "dtype": str(config.dtype).removeprefix("torch."),
        "num_layers": str(config.num_layers),
        "num_kv_heads": str(config.num_kv_heads),
        "head_dim": str(config.head_dim),
        **({"latent": str(config.latent)} if config.latent else {}),
        "rope": f"{config.rope_theta:g} None",
        "weights": _weights_digest(directory),
    }


def renders(directory: Path) -> dict[str, str]:
    """What two engines must share to read token ids, and to render messages, alike."""
    tokenizer = Tokenizer.load(directory)
    named = json.dumps([tokenizer.special_tokens, bool(tokenizer.config.get("add_bos_token"))])
    template = chat_template_source(directory, tokenizer)
    return {
        "model": _weights_digest(directory),
        "tokenizer": short_hash(named, (directory / "tokenizer.json").read_bytes()),
        "chat_template": "none" if template is None else short_hash(named, template),
    }


def _weights_digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(path.name.encode())
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            (header_bytes,) = struct.unpack("<Q", prefix.ljust(8, b"\0"))
            digest.update(prefix + file.read(min(header_bytes, size)))
            for i in range(SAMPLES):
                file.seek(8 + header_bytes + max(0, size - 8 - header_bytes) * i // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
        digest.update(str(size).encode())
    return digest.hexdigest()[:16]
