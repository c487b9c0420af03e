"""Tokens to text: whole characters only, and stop strings wherever the tokens split them."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine_ext.reference.answer import Detokenizer, StopStrings
from engine_ext.reference.tiny_model import ENDOFTEXT_ID, TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = write_tiny_model(tmp_path_factory.mktemp("tokenizer"), TinyModel(layers=1))
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=True)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_a_character_comes_whole_or_not_at_all(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "né 漢 🙂!")
    assert len(ids) > len("né 漢 🙂!")
    pieces = pieces_of(tokenizer, ids, encode(tokenizer, "prompt"))
    assert "".join(pieces) == "né 漢 🙂!"
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 258), max_size=120))
@settings(max_examples=200, deadline=None)
def test_the_pieces_are_the_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces_of(tokenizer, ids, [])) == tokenizer.decode(ids)


def test_bytes_that_never_become_characters_do_not_pile_up(tokenizer: Tokenizer) -> None:
    byte = encode(tokenizer, "é")[1]
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    text = ""
    for count in range(1, 200):
        text += detokenizer.push(byte)
        assert len(text) >= count - 3
    assert text + detokenizer.flush() == tokenizer.decode([byte] * 199)


def test_a_broken_end_of_the_prompt_is_not_part_of_the_answer(tokenizer: Tokenizer) -> None:
    half = encode(tokenizer, "é")[:1]
    assert "".join(pieces_of(tokenizer, encode(tokenizer, "ab"), half)) == "ab"


def test_special_tokens_show_only_when_asked_for(tokenizer: Tokenizer) -> None:
    for skip, expected in ((True, ""), (False, "<|endoftext|>")):
        detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=skip)
        assert detokenizer.push(ENDOFTEXT_ID) == expected


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama 2's way: a space begins a word and is dropped at the very start; bytes are tokens."""
    words = ["▁Hello", "▁world", "!", "<0xE6>", "<0xBC>", "<0xA2>", "<unk>"]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_the_space_of_the_first_word_is_kept(sentencepiece: Tokenizer) -> None:
    assert pieces_of(sentencepiece, [1, 2, 1], [0]) == [" world", "!", " world", ""]
    many = [1, 2] * 40
    assert "".join(pieces_of(sentencepiece, many, [0])) == " world!" * 40


def test_a_character_out_of_byte_tokens_comes_whole(sentencepiece: Tokenizer) -> None:
    assert pieces_of(sentencepiece, [1, 3, 4, 5, 2], [0]) == [" world", "", "", "漢", "!", ""]


def scan_all(stops: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    text = ""
    for piece in pieces:
        released, matched = stops.scan(piece)
        text += released
        if matched is not None:
            return text, matched
    return text + stops.flush(), None


@given(
    text=st.text("ab.", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=8),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=500)
def test_text_and_match_fit_together_however_the_pieces_are_cut(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:z] for a, z in itertools.pairwise(bounds)]
    found, matched = scan_all(StopStrings(stops), pieces)
    if matched is None:
        assert found == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(found + matched)
        assert not any(stop in found for stop in stops)


def test_only_what_may_become_a_stop_string_is_kept_back() -> None:
    stops = StopStrings(["</s>", "END"])
    assert stops.scan("hello <") == ("hello ", None)
    assert stops.scan("/") == ("", None)
    assert stops.scan("b>E") == ("</b>", None)
    assert stops.scan("ND of it") == ("", "END")


def test_the_earliest_match_wins() -> None:
    stops = StopStrings(["cd", "b"])
    assert stops.scan("abcd") == ("a", "b")
