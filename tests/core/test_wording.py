"""Numbers with their nouns, and lists of words."""

import pytest

from agent.core.wording import counted, listed


@pytest.mark.parametrize(
    ("number", "words", "wording"),
    [
        (0, ("GPU",), "0 GPUs"),
        (1, ("GPU",), "1 GPU"),
        (2, ("GPU",), "2 GPUs"),
        (1, ("process", "processes"), "1 process"),
        (5, ("process", "processes"), "5 processes"),
    ],
)
def test_a_noun_follows_its_number(number: int, words: tuple[str, ...], wording: str) -> None:
    assert counted(number, *words) == wording


@pytest.mark.parametrize(
    ("words", "wording"), [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c"], "a, b or c")]
)
def test_words_are_listed_as_in_a_sentence(words: list[str], wording: str) -> None:
    assert listed(words, "or") == wording
