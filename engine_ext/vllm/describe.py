"""vLLM's configuration and memory as the records of the engine half."""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from engine_ext.common.access import OPEN
from engine_ext.common.config import CONNECTORS, ConnectorConfig
from engine_ext.common.short_hash import short_hash
from engine_ext.common.types import (
    CONFIGURATION,
    SHARED,
    STATE,
    CacheGeometry,
    EngineIdentity,
    Region,
    StateSection,
    chunked,
)
from engine_ext.http import identity
from engine_ext.vllm.compat import support
from engine_ext.vllm.compat.probe import Feature
from engine_ext.vllm.optional.answers import PREEMPTION_RETURN, RESUME, THRESHOLD
from engine_ext.vllm.optional.load_failures import LOAD_FAILURES
from engine_ext.vllm.optional.loans import LENDING
from engine_ext.vllm.optional.steps import STEP_BUDGET
from engine_ext.vllm.optional.streams import STREAMS
from engine_ext.vllm.optional.without_patch import LOOKAHEAD, SCHEDULER, STATE_LAYERS, STOCK_PEERS
from engine_ext.vllm.state_sections import state_sections

SCHEDULERS = "engine_ext.vllm.scheduler"
"""The module of our scheduler classes."""

STATELESS = frozenset(("ngram", "suffix"))
"""Ways of speculation that keep nothing of a request at an engine but its tokens."""

STATES = (MambaSpec, CircularBufferSpec)
"""Layers that keep one block of a request: a state, or a ring of tokens to be compressed."""
RINGS = frozenset(("deepseek_v41", "step5"))
"""Models with such rings and no other state. No other attribute shows this before vLLM makes the
KV cache."""
LATENT = (MLAAttentionSpec, SlidingWindowMLASpec)
ATTENTION = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, *LATENT)
"""Layers whose blocks are those of the tokens, or of the last ones."""

KEYS_BEFORE_VALUES = frozenset(("CPU_ATTN",))
"""Backends whose blocks have all keys of a head before all its values, and in an order of the
CPU's liking."""

CONFIG_KEYS = (
    "kv_connector",
    "kv_role",
    "kv_buffer_device",
    "kv_load_failure_policy",
    "engine_id",
    "enable_permute_local_kv",
)


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig | None:
    """Return the connector's; of several connectors (vLLM's MultiConnector), that of ours."""
    config: KVTransferConfig | None = vllm_config.kv_transfer_config
    if config is None or config.kv_connector in CONNECTORS:
        return config
    several = config.kv_connector_extra_config.get("connectors", ())
    own = next((each for each in several if each.get("kv_connector") in CONNECTORS), None)
    return config if own is None else KVTransferConfig(**{"engine_id": config.engine_id, **own})


def connector_config(vllm_config: VllmConfig) -> ConnectorConfig:
    """Raises ValueError, one line, for what is wrong or not supported."""
    return _read_config(vllm_config.kv_transfer_config)


def _read_config(config: KVTransferConfig) -> ConnectorConfig:
    raw: dict[str, Any] = {key: getattr(config, key) for key in CONFIG_KEYS}
    raw["kv_connector_extra_config"] = config.kv_connector_extra_config
    return ConnectorConfig.from_kv_transfer_config(
        {key: value for key, value in raw.items() if value is not None}
    )


WAYS_OUT = "Start without it, or with NixlConnector: the same router works with both"


def refuse_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ValueError naming what the connector cannot move."""
    parallel, cache = vllm_config.parallel_config, kv_cache_config
    kinds = unknown_cache_kinds(vllm_config, cache)
    states = (spec for spec in _layer_specs(cache) if isinstance(spec, MambaSpec))
    # We know a state for each request, and an earlier one before it where prefixes are cached.
    modes = {spec.mamba_cache_mode for spec in states} - {"none", "align"}
    is_in_part = len(cache.transfer_group_ids) < len(cache.kv_cache_groups)
    problems = {
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        **{f"KV cache of {kind}": True for kind in sorted(kinds)},
        "sleep mode (the KV cache gets other memory)": vllm_config.model_config.enable_sleep_mode,
        "KV-cache groups that are not transferred": is_in_part,
        **{f"states kept in mode {mode}": True for mode in modes},
    }
    found = [name for name, present in problems.items() if present]
    if found:
        raise ValueError(f"DisaggConnector does not support {', '.join(found)} yet. {WAYS_OUT}")


def unknown_cache_kinds(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[str]:
    """Return the kinds of layers whose blocks we cannot move. In a group of unlike layers, workers
    see each layer's kind. Prompts of models with a state end a token early, which must be known
    before there is a cache."""
    known = (*ATTENTION, *(STATES if _has_state(vllm_config.model_config) else ()))
    layers = set(map(type, _layer_specs(kv_cache_config)))
    return {kind.__name__ for kind in layers.difference(known)}


def _has_indexer(model: ModelConfig) -> bool:
    """Return True for sparse attention. Beside the latents, an indexer's cache has the keys of all
    tokens of a kernel's block, then their scales."""
    return hasattr(model.hf_text_config, "index_topk")


def _specs(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    return [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]


def _layer_specs(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """Return each kind of layer in each group: several where layers differ in size and this is a
    worker; the scheduler sees one of them."""
    return [layer for spec in _specs(kv_cache_config) for layer in _layers_of(spec)]


def _first_layers(kv_cache_config: KVCacheConfig) -> list[KVCacheSpec]:
    """Return the first kind of layer of each group. All of a group have the same window."""
    return [next(iter(_layers_of(spec))) for spec in _specs(kv_cache_config)]


def _layers_of(spec: KVCacheSpec) -> Collection[KVCacheSpec]:
    return spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def _block_sizes(block_size: int, kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return the tokens of each group's blocks if any has not the usual number. vLLM gives layers
    with less per token more tokens per block, so that all blocks have as many bytes. A state's
    block is as long as the longest request, and of no use here."""
    sizes = [
        block_size if windowed == STATE else spec.block_size
        for spec, windowed in zip(_specs(kv_cache_config), windows(kv_cache_config), strict=True)
    ]
    return tuple(sizes) if {*sizes} - {block_size} else ()


def windows(kv_cache_config: KVCacheConfig) -> tuple[int | None, ...]:
    """Return each group's window; see `CacheGeometry.group_windows`."""
    return tuple(map(_window, _first_layers(kv_cache_config)))


def _window(spec: KVCacheSpec) -> int | None:
    if isinstance(spec, STATES):
        return STATE
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return chunked(spec.attention_chunk_size)
    if not isinstance(spec, SlidingWindowSpec):
        return None
    # Where layers that guess look ahead, vLLM keeps as many tokens more.
    more = spec.extra_retained_tokens if support.is_on(LOOKAHEAD) else 0
    return int(spec.sliding_window + more)


def uncached_groups(kv_cache_config: KVCacheConfig) -> frozenset[int]:
    """Return the groups that vLLM's prefix cache does not keep. After a prefix cache hit vLLM
    computes the last window of these groups again (bounded replay), unless a load provides it."""
    layers = enumerate(_first_layers(kv_cache_config))
    return frozenset(group for group, layer in layers if not layer.prefix_cacheable)


def guess_blocks(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Return how many of the blocks that each group has of a request are for states behind
    guesses."""
    return tuple(
        layer.num_speculative_blocks if isinstance(layer, MambaSpec) else 0
        for layer in _first_layers(kv_cache_config)
    )


def supports_divergent_hits(kv_cache_config: KVCacheConfig) -> bool:
    """Return True for full attention and states alone, one kind of each. vLLM reports how much of
    the first kind it has cached; a load would not fill what another kind, or a window, lacks."""
    kinds = {spec for spec in _specs(kv_cache_config) if not isinstance(spec, MambaSpec)}
    return len(kinds) <= 1 and set(windows(kv_cache_config)) <= {None, STATE}


def _has_state(model: ModelConfig) -> bool:
    """Return True if some layers keep a state instead of tokens, or beside them. This is known
    before there is a cache."""
    has_rings = model.hf_text_config.model_type in RINGS
    is_known = support.is_on(STATE_LAYERS)
    return is_known and bool(model.is_hybrid or model.is_attention_free or has_rings)


def scheduler_geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheGeometry:
    """Return what the scheduler half needs; only workers know layout and backend."""
    block_size = vllm_config.cache_config.block_size
    sizes = _block_sizes(block_size, kv_cache_config)
    return CacheGeometry(
        lcm(*sizes) if sizes else block_size,
        kv_cache_config.num_blocks,
        group_windows=windows(kv_cache_config),
        group_block_sizes=sizes,
        uncached_groups=uncached_groups(kv_cache_config),
        may_load=may_load(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        lookahead=_lookahead(vllm_config),
    )


def may_load(vllm_config: VllmConfig) -> bool:
    """Return False if loaded blocks could be overwritten. With several steps under way, vLLM hands
    out the blocks of an aborted request while a step still writes there, unless kv_role says that
    the engine loads."""
    loads: bool = vllm_config.kv_transfer_config.is_kv_consumer
    return loads or vllm_config.max_concurrent_batches <= 1


def _lookahead(vllm_config: VllmConfig) -> int:
    if not support.is_on(LOOKAHEAD):
        return 0
    return int(vllm_config.num_prefill_lookahead_tokens)


def cache_geometry(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
) -> CacheGeometry:
    """Return the geometry of this worker's cache; only workers have a rank. vLLM numbers them by
    stage, then by tensor rank (context parallelism is refused)."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    model = vllm_config.model_config
    stage, tp_rank = divmod(parallel.rank, parallel.tensor_parallel_size)
    backend = get_current_attn_backends(vllm_config)[0].get_name()
    sizes = _block_sizes(cache.block_size, kv_cache_config)
    sections = _state_sections(vllm_config, kv_cache_config, kv_caches)
    is_divided = bool(sections) or not _has_state(model)
    return CacheGeometry(
        block_size=lcm(*sizes) if sizes else cache.block_size,
        num_blocks=kv_cache_config.num_blocks,
        kv_cache_layout=cache.get_resolved_kv_cache_layout().name,
        attn_backend_name=backend,
        group_block_sizes=sizes,
        group_kernel_sizes=_kernel_sizes(cache.block_size, kv_caches, kv_cache_config),
        is_cut_by_tokens=_is_cut_by_tokens(backend, model, kv_cache_config),
        num_kv_heads=_num_kv_heads(model, kv_cache_config) if is_divided else None,
        tp_rank=tp_rank,
        pp_rank=stage % parallel.pipeline_parallel_size,
        group_windows=windows(kv_cache_config),
        state_sections=sections,
        lends=why_not_lent(vllm_config, kv_cache_config) is None,
    )


def _kernel_sizes(
    block_size: int, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig
) -> tuple[int, ...]:
    """Return each group's tokens per block of the attention kernels, if a block is several of
    these. Then a cache has as many times the blocks."""
    parts = []
    for group in kv_cache_config.kv_cache_groups:
        lengths = [len(kv_caches[name]) for name in group.layer_names if name in kv_caches]
        parts.append(max(lengths, default=0) // kv_cache_config.num_blocks or 1)
    sizes = _block_sizes(block_size, kv_cache_config) or (block_size,) * len(parts)
    kernels = tuple(size // part for size, part in zip(sizes, parts, strict=True))
    return kernels if max(parts) > 1 else ()


CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def why_not_lent(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why this engine lends no prefixes; None if it does."""
    problem = why_no_loans(vllm_config, kv_cache_config)
    if problem is None and not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, by a flag or by vLLM itself for this model"
    return problem


def why_no_loans(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why this engine neither lends nor borrows prefixes; None if it may. Blocks behind a
    window are evicted alone, and those of draft layers depend on later tokens."""
    if not support.is_on(LENDING):
        return f"{LENDING.name} is off: {support.reason(LENDING)}"
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    is_near = parallel.nnodes == 1 and parallel.distributed_executor_backend in ("mp", "uni")
    num_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    drafts = _speculation_kind(vllm_config.speculative_config)
    connector = None if transfer is None else transfer.kv_connector
    problems = {
        f"its scheduler class is not one of {SCHEDULERS}": not _uses_our_scheduler(vllm_config),
        f"blocks are hashed by {cache.prefix_caching_hash_algo}, for which equal hashes can be "
        "made": cache.prefix_caching_hash_algo not in CRYPTOGRAPHIC,
        "--prefix-match-unit": cache.prefix_match_unit not in (None, cache.block_size),
        "some layers have a window or keep a state": set(windows(kv_cache_config)) != {None},
        "blocks of several sizes": bool(_block_sizes(cache.block_size, kv_cache_config)),
        "speculation with draft layers": drafts is not None,
        "several tensor or pipeline ranks": num_ranks > 1,
        "workers on other nodes": not is_near,
        f"its KV connector is {connector}": connector not in CONNECTORS,
    }
    return next((why for why, is_so in problems.items() if is_so), None)


def _num_kv_heads(model: ModelConfig, kv_cache_config: KVCacheConfig) -> int | None:
    """Return the heads of a layer over all ranks; 1 for latents, whose one vector every rank has,
    of any size. None if the cache is not divided by heads, or if not every layer's block has the
    same heads, each with the keys and values of the block's tokens: some backends separate data
    from scales, or all keys from all values, and layers with other heads may share the memory of a
    block."""
    specs = _attention_specs(kv_cache_config)
    if any(spec.num_head_slots is not None for spec in specs):
        return None
    if all(isinstance(spec, LATENT) and spec.num_kv_heads == 1 for spec in specs):
        return 1
    heads = {(spec.num_kv_heads, spec.state_content_size_bytes) for spec in specs}
    return int(model.get_total_num_kv_heads()) if len(heads) <= 1 else None


def _state_sections(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[StateSection, ...]:
    """Return how the block of a state is divided. Where attention shares its memory, that is known
    only if all its blocks are of one length, and no shorter, for a region has that of the longest
    block."""
    lengths: dict[bool, set[int]] = {True: set(), False: set()}
    states = [spec for spec in _layer_specs(kv_cache_config) if isinstance(spec, STATES)]
    groups = zip(kv_cache_config.kv_cache_groups, _first_layers(kv_cache_config), strict=True)
    for group, layer in groups:
        caches = [kv_caches[name] for name in group.layer_names if name in kv_caches]
        lengths[isinstance(layer, STATES)] |= {
            cache.numel() * cache.element_size() for cache in caches
        }
    longest = max(lengths[True], default=0)
    if len(lengths[False]) > 1 or min(lengths[False], default=longest) < longest:
        return ()
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    return state_sections(states, tp_size, vllm_config.model_config.hf_text_config)


def _attention_specs(kv_cache_config: KVCacheConfig) -> list[AttentionSpec]:
    return [spec for spec in _layer_specs(kv_cache_config) if isinstance(spec, AttentionSpec)]


def _is_cut_by_tokens(backend: str, model: ModelConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Return True if a part of a block has all of a part of its tokens."""
    is_compressed = any(spec.tokens_per_state != 1 for spec in _attention_specs(kv_cache_config))
    return not (backend in KEYS_BEFORE_VALUES or _has_indexer(model) or is_compressed)


def engine_identity(
    vllm_config: VllmConfig, config: ConnectorConfig, geometry: CacheGeometry | None
) -> EngineIdentity:
    """`geometry` is known to workers only; without it there is nothing to compare."""
    host, port = side_channel(vllm_config)
    compat_hash, factors = None, {}
    if geometry is not None:
        backend = geometry.attn_backend_name
        compat_hash = stock_hash(vllm_config, backend, config.transfer_mode)
        factors = _factors(vllm_config, backend, config)
    return EngineIdentity(
        config.engine_id,
        host,
        port,
        tp_size=vllm_config.parallel_config.tensor_parallel_size,
        pp_size=vllm_config.parallel_config.pipeline_parallel_size,
        compat_factors=factors,
        compat_hash=compat_hash,
    )


def stock_hash(vllm_config: VllmConfig, backend: str, mode: str) -> str | None:
    """Return the hash that stock engines compare with their own."""
    if not support.is_on(STOCK_PEERS):
        return None
    # Stock moves a state piece by piece. And where guesses look further ahead, it leaves out a
    # prompt's end: as it pairs blocks from the end, it would take each for its neighbour.
    if _has_state(vllm_config.model_config) or _drafts_beyond_next_token(vllm_config):
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
        compute_nixl_compatibility_hash,
    )

    return str(compute_nixl_compatibility_hash(vllm_config, backend, mode))


def stock_version() -> dict[str, str]:
    """Return the version of stock's protocol in this release, which its hash contains."""
    if not support.is_on(STOCK_PEERS):
        return {}
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    return {"connector": str(NIXL_CONNECTOR_VERSION)}


def _drafts_beyond_next_token(vllm_config: VllmConfig) -> bool:
    """Return True if drafts may reach beyond the next token."""
    if not support.is_on(LOOKAHEAD):
        return vllm_config.speculative_config is not None
    return _lookahead(vllm_config) > 1


def side_channel(vllm_config: VllmConfig) -> tuple[str, int]:
    rank: int = vllm_config.parallel_config.data_parallel_index
    return envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT + rank


def wakeup_name(vllm_config: VllmConfig, config: ConnectorConfig) -> str:
    """Return the name by which an engine's processes find each other on their machine. Another
    engine there has another port, whatever its engine_id."""
    return f"{config.engine_id}-{side_channel(vllm_config)[1]}"


def _factors(vllm_config: VllmConfig, backend: str, config: ConnectorConfig) -> dict[str, str]:
    """Return what vLLM hashes, field by field, so that the log can name a mismatch."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    scheduler = vllm_config.scheduler_config
    return {
        "vllm_version": vllm_version,
        "model": str(model.model),
        "dtype": str(model.dtype),
        "num_kv_heads": str(model.get_total_num_kv_heads()),
        "head_size": str(model.get_head_size()),
        "num_layers": str(model.get_total_num_hidden_layers()),
        "cache_dtype": str(cache.cache_dtype),
        "attn_backend": backend,
        "hybrid_kv_cache_manager": str(not scheduler.disable_hybrid_kv_cache_manager),
        "speculative_decoding": str(_speculation_kind(vllm_config.speculative_config)),
        "transfer_mode": config.transfer_mode,
        CONFIGURATION: _configuration_digest(model),
        **(_factors_of_state(vllm_config) if _has_state(model) else {}),
    }


NOT_COMPUTED_WITH = frozenset(("transformers_version", "dtype", "torch_dtype"))
"""Fields of a Hugging Face configuration that vLLM compares itself, or that change no value."""


def _configuration_digest(model: ModelConfig) -> str:
    """Return a digest of what the KV of equal tokens depends on, beside weights, and beside the
    other factors: the configuration with its overrides, and the revisions of weights and code."""
    config = model.hf_config
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings")
    is_long = isinstance(trained, int) and model.max_model_len > trained
    return short_hash(
        json.dumps(
            [
                _plain(config.to_dict()),
                # The revision may name a branch, whose commit the configuration knows.
                str(getattr(config, "_commit_hash", None) or model.revision),
                str(model.code_revision),
                str(model.quantization),
                # LongRoPE has other factors if the context is longer than it was trained for.
                is_long and rope.get("rope_type") == "longrope",
            ],
            sort_keys=True,
        )
    )


def _plain(value: object) -> object:
    """Return a value as JSON that is equal in every process: no addresses, no order of sets."""
    if isinstance(value, Mapping):
        own = {str(name): _plain(one) for name, one in value.items()}
        own = {name: one for name, one in own.items() if not name.startswith("_")}
        return {name: one for name, one in own.items() if name not in NOT_COMPUTED_WITH}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    is_text = value is None or isinstance(value, str | int | float | torch.dtype)
    return str(value) if is_text else type(value).__name__


def _factors_of_state(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the types, layout and length of a state, which a block's length does not show. A
    convolution keeps more inputs where several tokens are guessed."""
    cache, speculation = vllm_config.cache_config, vllm_config.speculative_config
    kinds = cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    guesses = 0 if speculation is None else speculation.num_speculative_tokens
    return {"state": " ".join((*kinds, str(envs.VLLM_SSM_CONV_STATE_LAYOUT), str(guesses)))}


def _speculation_kind(config: Any) -> str | None:
    """Return the kind of speculation if it keeps something beside the model's KV. Guesses at the
    prompt's own words do not: an engine without them may prefill for one that has them."""
    if config is None or config.method in STATELESS:
        return None
    return f"{config.method} {config.num_speculative_tokens}"


def engine(vllm_config: VllmConfig) -> identity.EngineDescription:
    """Describe this server, whichever connector it has, if any. Raises ValueError where
    our connector's configuration cannot be read any more."""
    parallel = vllm_config.parallel_config
    transfer, ours, modes = transfer_config(vllm_config), None, list[str]()
    if transfer is not None:
        modes = ["push" if "Push" in str(transfer.kv_connector) else "pull"]
        if transfer.kv_connector in CONNECTORS:
            ours = _read_config(transfer)
    return identity.EngineDescription(
        name="vllm",
        side_channels=_side_channels(vllm_config) if transfer is not None else (),
        transfer_modes=modes,
        capabilities=capabilities_of(vllm_config, ours),
        access=OPEN if ours is None else ours.access,
        lease_seconds=None if ours is None else ours.lease_duration,
        # A stock connector's side channel does not tell it.
        factors={CONFIGURATION: _configuration_digest(vllm_config.model_config)},
        target_itl_ms=None if ours is None else target_itl_ms(vllm_config, ours),
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        dp_size=parallel.data_parallel_size,
        versions={"vllm": vllm_version, **stock_version()},
        features=support.features(),
        missing=support.missing(),
    )


def _side_channels(vllm_config: VllmConfig) -> list[identity.SideChannel]:
    """Return those of the data-parallel ranks on this machine; others have their own host."""
    host, port = envs.VLLM_NIXL_SIDE_CHANNEL_HOST, envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    parallel = vllm_config.parallel_config
    first = parallel.data_parallel_index
    ranks = range(first, first + max(1, parallel.data_parallel_size_local))
    return [identity.SideChannel(rank, host, port + rank) for rank in ranks]


def resumes(vllm_config: VllmConfig) -> bool:
    """Return True if answers can be resumed: our scheduler class counts the payload's tokens, and
    our plugin replays them in this process and shows them to the workers in theirs."""
    return _offers_feature(vllm_config, RESUME)


def _offers_feature(vllm_config: VllmConfig, feature: Feature) -> bool:
    """The feature needs our scheduler class and plugin, and a model that keeps no state."""
    is_there = support.is_on(feature) and support.is_installed(feature)
    return (
        is_there and _uses_our_scheduler(vllm_config) and not _has_state(vllm_config.model_config)
    )


def _uses_our_scheduler(vllm_config: VllmConfig) -> bool:
    """Return True if the engine runs our scheduler class."""
    if not support.is_on(SCHEDULER):
        return False
    named = vllm_config.scheduler_config.scheduler_cls
    name = named if isinstance(named, str) else getattr(named, "__module__", "")
    return name.startswith(SCHEDULERS)


def target_itl_ms(vllm_config: VllmConfig, config: ConnectorConfig) -> float | None:
    """Return the configured target. Raises ValueError if the engine cannot keep it."""
    if config.target_itl_ms is None:
        return None
    why = support.reason(STEP_BUDGET)
    problem = why and f"{STEP_BUDGET.name} is off: {why}"
    if not _uses_our_scheduler(vllm_config):
        problem = f"it needs --scheduler-cls {SCHEDULERS}.DisaggScheduler"
    elif not vllm_config.scheduler_config.enable_chunked_prefill:
        problem = "it needs chunked prefill"
    if problem is not None:
        raise ValueError(f"target_itl_ms: {problem}")
    return config.target_itl_ms


def capabilities_of(vllm_config: VllmConfig, config: ConnectorConfig | None) -> tuple[str, ...]:
    has_state = _has_state(vllm_config.model_config)
    has_scheduler = _uses_our_scheduler(vllm_config)
    # Data-parallel ranks know nothing of each other: each would read for its own share of several
    # answers to one prompt.
    is_one_rank = vllm_config.parallel_config.data_parallel_size == 1
    offered = {
        "cache_hit_threshold": has_scheduler and support.is_on(THRESHOLD),
        "begun": resumes(vllm_config),
        "hand_back": _offers_feature(vllm_config, PREEMPTION_RETURN),
        "hand_over": config is not None and not has_state,
        "shared_loads": config is not None and is_one_rank,
        "streamed_kv_transfer_params": support.is_on(STREAMS),
        "tell_token_ids": support.is_on(STREAMS),
        "load_failures": config is not None and has_scheduler and support.is_on(LOAD_FAILURES),
    }
    if config is not None and has_state:
        config = replace(config, bidirectional=False)  # A state belongs to no turn.
    ours = identity.capabilities_of(config)
    return (*(name for name, is_offered in offered.items() if is_offered), *ours)


def regions(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> list[Region]:
    """Return one region per layer, K and V packed, in the order of layer numbers that stock peers
    expect.

    Layers of different groups lie on the same memory, since a block is only ever of one group:
    they are one region, named by the first. Layers that use the cache of another have none.
    """
    groups = {
        layer: number
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        for layer in group.layer_names
    }
    found: dict[int, list[Region]] = {}
    for name in sorted(kv_caches.keys() & groups.keys(), key=_natural_key):
        region = _region(name, kv_caches[name], kv_cache_config.num_blocks, groups[name])
        found.setdefault(region.base_addr, []).append(region)
    return [
        _merge_layers(layers, len(kv_cache_config.kv_cache_groups)) for layers in found.values()
    ]


def _merge_layers(layers: list[Region], num_groups: int) -> Region:
    first, tenants = layers[0], {layer.group: layer.name for layer in layers}
    if len(tenants) == 1:
        return first
    longest = max(layer.block_len for layer in layers)  # a state may fill less of a block
    by_group = tuple(tenants.get(group, "") for group in range(num_groups))
    return replace(first, group=SHARED, block_len=longest, tenants=by_group)


def _natural_key(name: str) -> list[tuple[int, int | str]]:
    """`layers.2` before `layers.10`."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _region(name: str, cache: torch.Tensor, num_blocks: int, group: int) -> Region:
    # A kernel's blocks may be smaller: several, one behind the other, are a block.
    parts, rest = divmod(len(cache), num_blocks)
    blocks = cache if rest else cache.view(num_blocks, parts, *cache.shape[1:])
    block = blocks[0]
    if rest or not block.is_contiguous():
        raise ValueError(
            f"KV cache of {name} has shape {tuple(cache.shape)} and strides {cache.stride()}: "
            "blocks must come first, each in one piece (set VLLM_KV_CACHE_LAYOUT=LBHNC, or an "
            "--attention-backend that has this layout)"
        )
    return Region(
        name=name,
        base_addr=cache.data_ptr(),
        block_len=block.numel() * cache.element_size(),
        block_stride=blocks.stride(0) * cache.element_size(),
        num_blocks=num_blocks,
        device_id=max(cache.get_device(), 0),
        mem_type="DRAM" if cache.device.type == "cpu" else "VRAM",
        group=group,
    )
