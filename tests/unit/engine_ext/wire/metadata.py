"""What some prefill engine tells of itself in a handshake."""

from engine_ext.wire.handshake import AgentMetadata

METADATA = AgentMetadata(
    engine_id="p",
    agent_metadata=b"blob",
    kv_caches_base_addr=[1 << 46],
    device_id=0,
    num_blocks=8,
    block_lens=[64],
    block_strides=[64],
    kv_cache_layout="LBHNC",
    block_size=16,
    attn_backend_name="CPU_ATTN",
)
