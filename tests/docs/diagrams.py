"""The diagrams of the documentation: `python -m tests.docs.diagrams` writes them to docs/images."""

from collections.abc import Callable

from tests.docs.drawing import LINE, Drawing, Sequence
from tests.docs.markdown import ROOT

IMAGES = ROOT / "docs" / "images"
CLIENT, ROUTER = ("Client", ""), ("disagg-router", "router")
PREFILL, DECODE = ("Prefill engine P", "prefill"), ("Decode engine D", "decode")


def parts() -> Drawing:
    """The two halves and their ports."""
    drawing = Drawing(
        "The two halves of disagg-router and their ports",
        "Clients send HTTP to the router on port 8000. The router sends HTTP to a prefill"
        " engine and a decode engine. Each engine contains the engine half, a connector. The"
        " connectors exchange handshakes over the side channel, TCP port 5600, and KV blocks"
        " over NIXL. KV never passes through the router.",
        height=432,
    )
    drawing.box(20, 40, 150, 64, "", "Clients", "OpenAI or Anthropic API")
    drawing.frame(300, 20, 440, 104, "router")
    drawing.text(520, 42, "Router half: disagg-router", "title", "middle")
    for index, (port, use) in enumerate(
        (
            ("--port 8000", "/v1/..., /ready, /metrics, /ui"),
            ("--liveness-port", "/health, /metrics from a separate thread"),
            ("--admin-port", "admin API, on loopback by default"),
        )
    ):
        drawing.text(316, 66 + index * 20, port, "code")
        drawing.text(440, 66 + index * 20, use, "muted")
    drawing.line([(172, 72), (297, 72)])
    drawing.label(234, 62, "HTTP", "")
    drawing.label(234, 92, "answer, streamed", "muted")
    for x, role, kind, number in (
        (20, "Prefill", "prefill", 8100),
        (470, "Decode", "decode", 8200),
    ):
        drawing.frame(x, 222, 270, 186, kind)
        middle = x + 135
        drawing.text(middle, 244, f"{role} engine: vLLM", "title", "middle")
        drawing.text(middle, 262, f"HTTP, for example port {number}", "muted", "middle")
        drawing.frame(x + 14, 276, 242, 118, "router")
        drawing.text(middle, 297, "Engine half: DisaggConnector", "title", "middle")
        drawing.text(middle, 318, "scheduler half: decides, leases", "muted", "middle")
        drawing.text(middle, 336, "worker half: moves KV over NIXL", "muted", "middle")
        drawing.text(middle, 360, "side channel: TCP port 5600", "muted", "middle")
        drawing.text(middle, 378, "NIXL: RDMA, or UCX over TCP", "muted", "middle")
    drawing.line([(400, 126), (400, 160), (155, 160), (155, 219)])
    drawing.line([(605, 126), (605, 219)])
    drawing.label(278, 150, "1. prefill leg")
    drawing.label(605, 166, "2. decode leg with kv_transfer_params")
    drawing.label(380, 196, "also GET /health, /disagg/identity; POST /disagg/release", "muted")
    drawing.line([(279, 322), (481, 322)], "reply", both=True)
    drawing.line([(276, 366), (480, 366)], "kv")
    drawing.label(380, 308, "handshake, renewals")
    drawing.label(380, 352, "3. KV blocks")
    drawing.label(380, 390, "not through the router", "muted")
    return drawing


def pull() -> Drawing:
    drawing = Sequence(
        "A pull: the decode engine READs the prompt's KV",
        "The router sends the prefill leg to P. P computes the prompt, keeps its blocks under a"
        " lease and answers with kv_transfer_params. The router sends the decode leg with these"
        " params to D. D renews the lease, READs the blocks over NIXL and confirms; P frees"
        " them. D streams the answer through the router to the client.",
        client=CLIENT,
        router=ROUTER,
        p=PREFILL,
        d=DECODE,
    )
    drawing.message("client", "router", "POST /v1/chat/completions")
    drawing.message("router", "p", "prefill leg", "max_tokens 1, do_remote_decode")
    drawing.note("p", "computes the prompt,", "keeps its blocks", "under a lease of 30 s")
    drawing.message(
        "p", "router", "answer: kv_transfer_params", "engine, blocks, prefix hashes", style="reply"
    )
    drawing.message("router", "d", "decode leg", "the client's request and P's kv_transfer_params")
    drawing.message("d", "p", "handshake (once a pair),", "lease renewals", style="reply")
    drawing.note("d", "allocates blocks")
    drawing.message("p", "d", "KV blocks", "NIXL READ by D", style="kv")
    drawing.message("d", "p", "confirmation", style="reply")
    drawing.note("p", "frees its blocks")
    drawing.note("d", "decodes")
    drawing.message("d", "router", "tokens, streamed", style="reply")
    drawing.message("router", "client", "tokens, streamed", style="reply")
    return drawing.finished()


def push() -> Drawing:
    drawing = Sequence(
        "A push: the prefill engine WRITEs while it computes",
        "The router sends the prefill leg to P and the decode leg to D at the same time, with"
        " one transfer id. D registers blocks with P. P WRITEs complete blocks while it computes"
        " the rest of the prompt, then the last blocks and a notification. D decodes and streams"
        " the answer through the router to the client.",
        client=CLIENT,
        router=ROUTER,
        p=PREFILL,
        d=DECODE,
    )
    drawing.message("client", "router", "POST /v1/chat/completions")
    drawing.message("router", "p", "prefill leg", "with a new transfer_id")
    drawing.message("router", "d", "decode leg, sent at the same time", "with the same transfer_id")
    drawing.note("d", "allocates blocks")
    drawing.message("d", "p", "registration of D's blocks", style="reply")
    drawing.note("p", "computes the prompt,", "chunk by chunk")
    drawing.message("p", "d", "complete blocks", "NIXL WRITE while P computes", style="kv")
    drawing.message("p", "d", "last blocks, notification", "NIXL WRITE at the end", style="kv")
    drawing.message("p", "router", "answer of the prefill leg", style="reply")
    drawing.note("d", "decodes")
    drawing.message("d", "router", "tokens, streamed", style="reply")
    drawing.message("router", "client", "tokens, streamed", style="reply")
    return drawing.finished()


def second_turn() -> Drawing:
    drawing = Sequence(
        "The second turn of a conversation reuses the first one's KV",
        "After the first answer D retains the conversation's KV for up to 480 seconds, and the"
        " router stores D's kv_transfer_params. With the next turn the router sends them to P,"
        " which compares prefix hashes, READs the equal prefix from D and computes only the new"
        " tokens. D then READs the new blocks from P and answers.",
        client=CLIENT,
        router=ROUTER,
        p=PREFILL,
        d=DECODE,
    )
    drawing.note("d", "turn 1: retains the KV", "for 480 s at most")
    drawing.message("d", "router", "end of answer 1: D's kv_transfer_params", style="reply")
    drawing.note("router", "stores them for", "the conversation")
    drawing.message("client", "router", "turn 2: the history", "and a new question")
    drawing.note("router", "takes the entry,", "once")
    drawing.message("router", "p", "prefill leg", "with D's kv_transfer_params")
    drawing.note("p", "compares the", "prefix hashes")
    drawing.message("d", "p", "KV of the equal prefix", "NIXL READ by P", style="kv")
    drawing.note("p", "computes the new", "tokens only")
    drawing.message("p", "router", "kv_transfer_params", style="reply")
    drawing.message(
        "router",
        "d",
        "decode leg, to the same D if it is not overloaded",
        "with P's kv_transfer_params",
    )
    drawing.message("p", "d", "blocks that D lacks", "NIXL READ by D", style="kv")
    drawing.message("d", "router", "answer 2, streamed", style="reply")
    drawing.message("router", "client", "answer 2", "cached_tokens in usage", style="reply")
    return drawing.finished()


def resume() -> Drawing:
    drawing = Sequence(
        "A stream resumes on another decode engine",
        "Decode engine D1 streams tokens through the router, which records the token ids. D1"
        " crashes. The router sends the prompt's and the sent tokens to P as a prefill leg. P"
        " computes them and samples the next token. The router sends a decode leg to D2, which"
        " READs the KV and continues the stream. The client sees one answer.",
        client=CLIENT,
        router=ROUTER,
        p=("Prefill P", "prefill"),
        d1=("Decode D1", "decode"),
        d2=("Decode D2", "decode"),
    )
    drawing.message("d1", "router", "tokens 1 to k with their ids", style="reply")
    drawing.message("router", "client", "tokens 1 to k", style="reply")
    drawing.note("router", "records the ids", width=140)
    drawing.end("d1", "D1 crashes")
    drawing.message("router", "p", "prefill leg:", "prompt, tokens 1 to k")
    drawing.note("p", "computes both,", "samples token k+1", width=140)
    drawing.message("p", "router", "kv_transfer_params", style="reply")
    drawing.message("router", "d2", "decode leg with tokens 1 to k+1 and P's kv_transfer_params")
    drawing.message("p", "d2", "KV blocks, NIXL READ by D2", style="kv")
    drawing.message("d2", "router", "tokens k+1, k+2, ...", style="reply")
    drawing.message("router", "client", "tokens k+1, ...", "in the same stream", style="reply")
    return drawing.finished()


def lease() -> Drawing:
    """The end of a lease over time, as heartbeats move it."""
    drawing = Drawing(
        "A KV lease and its heartbeats over time",
        "With the defaults P grants a lease of 30 seconds. D sends a heartbeat when the request"
        " arrives and every 5 seconds from then on, and each one lets the lease end no earlier than"
        " 20 seconds later. Case one: D waits 38 seconds in its queue, READs the blocks and"
        " confirms, and P frees them at once. Case two: D crashes after 17 seconds, and the lease"
        " ends by itself at 35 seconds. Case three: no engine takes the request, and the lease ends"
        " at 30 seconds.",
        height=452,
    )
    zero, scale = 120, 9

    def at(seconds: float) -> float:
        return zero + seconds * scale

    for seconds in range(0, 61, 10):
        drawing.line([(at(seconds), 44), (at(seconds), 386)], "life")
        drawing.text(at(seconds), 36, f"{seconds} s", "muted", "middle")
    for y, end, beats in ((60, 40, range(0, 40, 5)), (186, 35, range(0, 20, 5)), (312, 30, ())):
        drawing.box(zero, y, end * scale, 34, "prefill", "P: blocks under the lease")
        for beat in beats:
            x = at(beat or 0.6)
            drawing.line([(x, y + 66), (x, y + 37)])
    drawing.text(16, 80, "D reads late", "title")
    drawing.label(at(40) + 12, 81, "confirmed: P frees the blocks", "muted", "start")
    drawing.box(zero, 126, 38 * scale, 28, "decode", "D: queue, one heartbeat every 5 s")
    drawing.box(at(38), 126, 2 * scale, 28, "note")
    drawing.line([(at(40), 126), (at(40), 97)], "kv")
    drawing.label(at(40) + 12, 145, "READ, then confirmation", "muted", "start")
    drawing.text(16, 206, "D crashes", "title")
    drawing.label(at(35) + 12, 200, "15 s (last heartbeat) + 20 s:", "muted", "start")
    drawing.label(at(35) + 12, 200 + LINE, "the lease ends, P frees the blocks", "muted", "start")
    drawing.box(zero, 252, 17 * scale, 28, "decode", "D: queue")
    drawing.cross(at(17), 266)
    drawing.label(
        at(17) + 16, 271, "D crashes at 17 s and sends no more heartbeats", "muted", "start"
    )
    drawing.text(16, 332, "No reader", "title")
    drawing.label(at(30) + 12, 326, "30 s, as granted:", "muted", "start")
    drawing.label(at(30) + 12, 326 + LINE, "the lease ends, P frees the blocks", "muted", "start")
    for index, line in enumerate(
        (
            "kv_lease_duration is 30 s by default. D sends a heartbeat every sixth of it.",
            "A heartbeat lets the lease end no earlier than two thirds of it (20 s) later; it never"
            " shortens a lease.",
        )
    ):
        drawing.text(16, 416 + index * LINE, line, "muted")
    return drawing


def kubernetes() -> Drawing:
    drawing = Drawing(
        "disagg-router on Kubernetes",
        "A Gateway or Service sends client requests to the router's Deployment. Routers watch"
        " pods through the API server and find engines by the label llm-d.ai/role. They send"
        " HTTP to a Deployment of prefill engines and one of decode engines, which exchange KV"
        " among each other and mount one Secret. Redis and Prometheus are optional.",
        height=470,
    )
    drawing.box(20, 20, 170, 48, "", "Gateway (HTTPRoute)", "optional")
    drawing.box(20, 96, 170, 48, "", "Service", "port 80")
    drawing.line([(105, 70), (105, 93)])
    drawing.frame(270, 36, 240, 112, "router")
    drawing.text(390, 58, "Deployment: routers", "title", "middle")
    drawing.text(390, 80, "8000: clients", "muted", "middle")
    drawing.text(390, 98, "8001: /health, /metrics", "muted", "middle")
    drawing.text(390, 124, "optional: HPA, PodDisruptionBudget", "muted", "middle")
    drawing.line([(192, 120), (267, 120)])
    drawing.label(230, 112, "8000")
    drawing.box(590, 20, 150, 42, "", "API server")
    drawing.box(590, 76, 150, 42, "", "Redis", "optional: conversations")
    drawing.box(590, 132, 150, 42, "", "Prometheus", "optional: PodMonitor")
    drawing.line([(512, 50), (587, 50)])
    drawing.label(549, 40, "watch pods", "muted")
    drawing.line([(512, 97), (587, 97)])
    drawing.line([(587, 140), (512, 140)])
    for x, role, kind in ((20, "prefill", "prefill"), (500, "decode", "decode")):
        drawing.frame(x, 262, 240, 112, kind)
        drawing.text(x + 120, 284, f"Deployment: {role} engines", "title", "middle")
        drawing.text(x + 120, 306, f"llm-d.ai/role: {role}", "code", "middle")
        drawing.text(x + 120, 328, "8000: HTTP", "muted", "middle")
        drawing.text(x + 120, 346, "5600: side channel", "muted", "middle")
        drawing.text(x + 120, 364, "20000 to 20100: UCX (TCP), or RDMA", "muted", "middle")
    drawing.line([(340, 150), (340, 200), (140, 200), (140, 259)])
    drawing.line([(450, 150), (450, 200), (620, 200), (620, 259)])
    drawing.label(240, 190, "prefill legs, HTTP")
    drawing.label(535, 190, "decode legs, HTTP")
    drawing.line([(262, 318), (496, 318)], "kv", both=True)
    drawing.label(380, 306, "KV blocks")
    drawing.label(380, 342, "engine to engine", "muted")
    drawing.box(270, 404, 220, 46, "note", "Secret: side channel", "all engines mount the same one")
    drawing.line([(268, 427), (140, 427), (140, 377)], "reply")
    drawing.line([(492, 427), (620, 427), (620, 377)], "reply")
    return drawing


def decision() -> Drawing:
    drawing = Drawing(
        "Do I need disaggregation, and which transfer mode?",
        "A decision tree. If one engine carries the load, use one engine. If long prompts do"
        " not delay running answers, use aggregated engines behind a load balancer. If the"
        " network between engines moves a prompt's KV more slowly than an engine computes it,"
        " use aggregated engines with chunked prefill. If you cannot install a package beside"
        " vLLM, use the stock NixlConnector, which pulls. Otherwise pull with DisaggConnector;"
        " if you measure that the hand-over after long prompts is too slow, push with"
        " DisaggPushConnector.",
        height=576,
    )
    questions = (
        (("Does one engine", "carry the load?"), "yes", ("One vLLM engine, no router",)),
        (
            ("Do long prompts delay running answers,", "or must TTFT and ITL scale separately?"),
            "no",
            ("Aggregated engines", "behind any load balancer"),
        ),
        (
            ("Does the network move a prompt's KV", "faster than an engine computes it?"),
            "no",
            ("Aggregated engines", "with chunked prefill"),
        ),
        (
            ("Can you install a package", "beside vLLM on the engines?"),
            "no",
            ("Pull: stock NixlConnector", "behind this router"),
        ),
        (
            ("Is the hand-over after long prompts", "too slow when you measure a pull?"),
            "yes",
            ("Push: DisaggPushConnector", "P WRITEs while it computes"),
        ),
    )
    y = 20
    for index, (question, answer, outcome) in enumerate(questions):
        kind = "" if index < 3 else "decode"
        drawing.frame(40, y, 330, 58, "router")
        for row, text in enumerate(question):
            drawing.text(205, y + 26 + row * LINE, text, "", "middle")
        drawing.line([(372, y + 29), (487, y + 29)])
        drawing.label(430, y + 24, answer)
        drawing.box(490, y, 240, 58, kind, *outcome)
        drawing.line([(205, y + 60), (205, y + 93)])
        drawing.text(215, y + 82, "no" if answer == "yes" else "yes")
        y += 96
    drawing.box(
        40, y, 330, 58, "decode", "Pull: DisaggConnector", "the default; hands over the first token"
    )
    return drawing


# Bars of the chart of coding agents: their kind and their row in docs/performance.md.
AGENTS = {
    "our default": ("router", "with `--target-itl`, our default"),
    "exact knowledge": ("", "exact knowledge of all caches"),
    "Dynamo 1.6.1": ("prefill", "Dynamo 1.6.1, with KV events"),
    "vllm-router 0.1.17": ("decode", "vllm-router 0.1.17 `cache_aware`"),
    "least_loaded": ("note", "`least_loaded`"),
}


def agent_rows() -> dict[str, list[float]]:
    """Return each row's goodput with 1, 2 and 4 million tokens of cache, at loads 0.5, 1 and 2."""
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    table = page.partition("\n### Coding agents\n")[2].partition("\n#")[0]
    lines = {line.split("|")[1].strip(): line for line in table.splitlines() if line[:1] == "|"}
    return {row: list(map(float, lines[row].split("|")[2:-1])) for _, row in AGENTS.values()}


def agents() -> Drawing:
    """Goodput on the recorded sessions of Claude Code."""
    drawing = Drawing(
        "Goodput on 110 recorded sessions of Claude Code",
        "Bars for five ways to choose the prefill engine, at three sizes of the cache and three"
        " loads. With 1 million tokens of cache and load 2, our default reaches 0.74, exact"
        " knowledge 0.72, vllm-router 0.58, Dynamo 0.45 and least_loaded 0.11."
        " With more cache our default, exact knowledge and Dynamo are within 0.04 of each other.",
        height=316,
    )
    rows, left, bottom, scale, width = agent_rows(), 66, 262, 200, 12
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = bottom - share * scale
        drawing.line([(left - 6, y), (750, y)], "life")
        drawing.text(left - 12, y + 4, f"{share:g}", "muted", "end")
    for cell in range(9):
        cache, load = divmod(cell, 3)
        x = left + cell * 74 + cache * 8
        for index, (kind, row) in enumerate(AGENTS.values()):
            height = rows[row][cell] * scale
            drawing.frame(x + index * (width + 1), bottom - height, width, height, kind)
        drawing.text(x + 32, bottom + 18, f"load {(0.5, 1, 2)[load]:g}", "muted", "middle")
        if load == 1:
            text = f"{2**cache} million tokens of cache"
            drawing.text(x + 32, bottom + 38, text, "title", "middle")
    for x, (name, (kind, _)) in zip((66, 172, 314, 440, 604), AGENTS.items(), strict=True):
        drawing.frame(x, 18, 12, 12, kind)
        drawing.text(x + 18, 29, name)
    return drawing


DIAGRAMS: dict[str, Callable[[], Drawing]] = {
    "parts": parts,
    "pull": pull,
    "push": push,
    "lease": lease,
    "second-turn": second_turn,
    "resume": resume,
    "kubernetes": kubernetes,
    "decision": decision,
    "agents": agents,
}


def main() -> None:
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
