"""Chat templates that change earlier text although the messages only grow, in the ways in which
those of real model families do. The text is our own."""

TURNS = """
{%- for message in messages %}
{%- if message.role == "tool" %} <tool> {{ message.content }} <end>
{%- elif message.role != "assistant" %} <{{ message.role }}> {{ message.content }} <end>
{%- else %} <assistant>@
{%- if message.content %} {{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %} <call> {{ call.function.name }}{% endfor %} <end>
{%- endif %}
{%- endfor %}"""
ASKS = "{% if add_generation_prompt %} <assistant>@{% endif %}"
LAST_QUESTION = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == "user" %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}"""
TOOLS = " <tools>{% for tool in tools or [] %} {{ tool.function.name }}{% endfor %} <end>"


def template(thought: str, at_end: str, turns: str = TURNS) -> str:
    """`thought`: text before each past answer; `at_end`: before the one to come."""
    return turns.replace("@", thought) + ASKS.replace("@", at_end)


TEMPLATES = {
    "appends": template("", ""),
    # The prompt ends with an empty thought, which no history has.
    "thought at the end": template("", " <thought> <no_thought>"),
    # Steps of a tool loop have an empty thought; the next question removes it.
    "thought in steps": LAST_QUESTION
    + template(
        "{% if loop.index0 > ns.last %} <thought> <no_thought>{% endif %}",
        " <thought> <no_thought>",
    ),
    # The tools stand before the last question.
    "tools move": LAST_QUESTION
    + template(
        "",
        "",
        TURNS.replace(
            "{%- elif message.role",
            '{%- elif message.role == "user" and loop.index0 == ns.last and tools %}'
            + TOOLS
            + " <user> {{ message.content }} <end>\n{%- elif message.role",
            1,
        ),
    ),
    # The date stands in front of everything.
    "date": ' <date> {{ strftime_now("%f") }} <end>' + template("", ""),
}
