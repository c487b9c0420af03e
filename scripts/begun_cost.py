"""What a decode engine saves where it is given its prompt in ids: CPU of reading one request.

    python scripts/begun_cost.py MODEL_DIRECTORY [TOKENS ...]

Times `prepare_chat` of the reference engine, body to ids, on one core: rendered and tokenized, and
with `begun` in the same body, which still carries the messages. Medians of some runs, in ms.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import orjson

from engine_ext.base.begun import EngineResumeState
from engine_ext.reference.chat_template import ChatTemplate
from engine_ext.reference.server.preparation import prepare_chat
from engine_ext.reference.server.served_model import ServedModel
from engine_ext.reference.tokenizer import Tokenizer

RUNS = 7
WORDS = "A prefill engine fills blocks, a decode engine reads them; 7 of 10 answers begin soon. "
ROOM = 1 << 18


def served(directory: Path) -> ServedModel:
    tokenizer = Tokenizer.load(directory)
    return ServedModel(
        names=("m",),
        max_model_len=ROOM,
        vocab_size=tokenizer.size,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.load(directory, tokenizer),
    )


def conversation(model: ServedModel, tokens: int) -> list[dict[str, str]]:
    """Turns of about 500 tokens each."""
    per_turn = len(model.tokenizer.encode(WORDS * 20))
    turns = max(1, round(tokens / per_turn))
    roles = ("user", "assistant")
    said = [{"role": roles[i % 2], "content": f"{i} {WORDS * 20}"} for i in range(turns)]
    return [*said, {"role": "user", "content": "And?"}]


def median_ms(model: ServedModel, body: bytes) -> float:
    times = []
    for _ in range(RUNS):
        began = time.process_time()
        prepare_chat(model, body, None)
        times.append(1000 * (time.process_time() - began))
    return statistics.median(times)


def compare(model: ServedModel, tokens: int) -> dict[str, float]:
    body: dict[str, Any] = {"messages": conversation(model, tokens), "max_tokens": 100}
    rendered = orjson.dumps(body)
    prompt = prepare_chat(model, rendered, None).prompts[0].token_ids
    begun = EngineResumeState(prompt, (prompt[0],)).to_wire()
    given = orjson.dumps({**body, "kv_transfer_params": {"begun": begun}})
    return {
        "tokens": len(prompt),
        "rendered and tokenized, ms": median_ms(model, rendered),
        "given, ms": median_ms(model, given),
        "body, bytes": len(rendered),
        "ids in it, bytes": len(begun["prompt_token_ids"]),
        "ids as a JSON list, bytes": len(orjson.dumps(prompt)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("tokens", type=int, nargs="*", default=[1000, 16_000, 100_000])
    asked = parser.parse_args()
    model = served(asked.model)
    for tokens in asked.tokens:
        row = compare(model, tokens)
        print(", ".join(f"{name} {value:,.2f}".replace(".00", "") for name, value in row.items()))


if __name__ == "__main__":
    main()
