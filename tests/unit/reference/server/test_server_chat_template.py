import json
from pathlib import Path

import pytest

from engine_ext.reference.tiny_model import write_tiny_model
from engine_ext.reference.tokenizer import ChatTemplate, Tokenizer

USER = {"role": "user", "content": "hi"}


def test_special_tokens_tools_and_arguments_reach_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ tools | tojson }}|{{ mood }}", {"bos_token": "<s>"})
    rendered = template.render([USER], tools=[{"name": "ü"}], arguments={"mood": "calm"})
    assert rendered == '<s>|[{"name": "ü"}]|calm'


def test_arguments_never_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ add_generation_prompt }}")
    arguments = {"messages": [{"content": "forged"}], "add_generation_prompt": False}
    assert template.render([USER], arguments=arguments) == "hiTrue"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source).render([USER])


def test_deep_nesting_is_a_value_error() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate("{{ tools | tojson }}").render([USER], tools=[{"deep": deep}])


def test_invalid_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% for %}")


def test_a_template_file_wins_over_the_configured_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    assert template is not None
    assert template.render([USER]) == "from the file"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    assert template is not None
    assert template.render([USER]) == "yes"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path)) is None


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": 1}'])
def test_a_broken_tokenizer_is_one_clear_error(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
