"""A tiny LLaVA: the tiny model, and a CLIP that makes 16 tokens of an image.

An image's tokens are as long as words' are: what the projector makes of it is normed neither here
nor there, and the language model sees it among words.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from engine_ext.reference.tiny_model import VOCAB_SIZE, TinyModel, Weights
from tests.vllm.changed_model import normal, write_changed_model

IMAGE, IMAGE_ID = "<image>", VOCAB_SIZE
MODEL = TinyModel()
SIZE, PATCH = 56, 14
"""Pixels."""
IMAGE_TOKENS = (SIZE // PATCH) ** 2
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": PATCH,
    "projection_dim": 64,
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "image_token": IMAGE,
    "num_additional_image_tokens": 1,
}
IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "size": {"shortest_edge": SIZE},
    "crop_size": {"height": SIZE, "width": SIZE},
}


def write_image_model(directory: Path) -> Path:
    write_changed_model(directory, MODEL, {}, _as_llava)
    path = directory / "config.json"
    language = json.loads(path.read_text()) | {"vocab_size": VOCAB_SIZE + 1}
    path.write_text(json.dumps(_config(language)))
    (directory / "processor_config.json").write_text(json.dumps(PROCESSOR))
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _config(language: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_ID,
        "projector_hidden_act": "gelu",
        "text_config": language,
        "vision_config": VISION,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _as_llava(language: Weights) -> Weights:
    random = np.random.default_rng(1)

    drawn = normal(random)
    weights = {f"language_model.{name}": _with_row(name, w) for name, w in language.items()}
    hidden = 64
    tower = "vision_tower.vision_model"
    weights |= {
        f"{tower}.embeddings.class_embedding": drawn(hidden),
        f"{tower}.embeddings.patch_embedding.weight": drawn(hidden, 3, PATCH, PATCH),
        f"{tower}.embeddings.position_embedding.weight": drawn(IMAGE_TOKENS + 1, hidden),
        **_norm(f"{tower}.pre_layrnorm", hidden),
        **_norm(f"{tower}.post_layernorm", hidden),
    }
    for layer in range(2):
        name = f"{tower}.encoder.layers.{layer}"
        for part in "qkv":
            weights |= _linear(f"{name}.self_attn.{part}_proj", drawn(hidden, hidden))
        weights |= _linear(f"{name}.self_attn.out_proj", drawn(hidden, hidden))
        weights |= _linear(f"{name}.mlp.fc1", drawn(128, hidden))
        weights |= _linear(f"{name}.mlp.fc2", drawn(hidden, 128))
        weights |= _norm(f"{name}.layer_norm1", hidden) | _norm(f"{name}.layer_norm2", hidden)
    projector = "multi_modal_projector"
    weights |= _linear(f"{projector}.linear_1", drawn(MODEL.hidden, hidden))
    return weights | _linear(f"{projector}.linear_2", drawn(MODEL.hidden, MODEL.hidden))


def _with_row(name: str, weight: Any) -> Any:
    """For the image's token, which is never said."""
    if name not in ("model.embed_tokens.weight", "lm_head.weight"):
        return weight
    return np.vstack([weight, np.zeros((1, weight.shape[1]), dtype=np.float32)])


def _linear(name: str, weight: Any) -> Weights:
    return {f"{name}.weight": weight, f"{name}.bias": np.zeros(len(weight), dtype=np.float32)}


def _norm(name: str, size: int) -> Weights:
    return _linear(name, np.ones(size, dtype=np.float32))
