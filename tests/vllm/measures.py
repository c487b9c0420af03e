"""What vLLM and the connector in it count, and the prompts that tests send."""

from tests.integration.oracle import Prompt, tokens_of
from tests.integration.processes import Server, metric

COMPUTED = r'vllm:prompt_tokens_by_source_total\{.*source="local_compute"\}'
FETCHED = r'vllm:prompt_tokens_by_source_total\{.*source="external_kv_transfer"\}'
RUNNING = r"vllm:num_requests_running\{.*"
WAITING = r"vllm:num_requests_waiting\{.*"
USED = r"vllm:kv_cache_usage_perc\{.*"

SHORT = (1, 2, 31, 32, 33, 63, 64, 65, 90, 100)
LONG = (200, 255, 256, 257, 300, 500, 700, 900, 1200, 1500)


def prompts() -> list[Prompt]:
    return [tokens_of(length, 1000 + length) for length in SHORT + LONG]


def freed(server: Server) -> bool:
    return metric(server, USED) == 0


def counted(server: Server, name: str) -> float:
    """A counter or a gauge of the connector's."""
    return metric(server, rf"disagg_engine_kv_{name}(_total)?\{{.*")
