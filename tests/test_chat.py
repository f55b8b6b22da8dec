"""The character tokenizer: lossless where it accepts, total where it decodes."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telescope_jax.chat import CharTokenizer

TOKENIZER = CharTokenizer()
PRINTABLE = "".join(c for c in string.printable if c not in "\t\r\x0b\x0c")


@given(st.text(alphabet=PRINTABLE))
def test_every_printable_text_survives_the_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(
    st.lists(st.sampled_from(["What is ", " + ", "\\boxed{", "\\boxed", "What", "+ ", "7", "}"]))
)
def test_texts_made_of_pieces_and_their_fragments_survive_the_round_trip(parts):
    text = "".join(parts)
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.lists(st.integers(-5, TOKENIZER.vocab_size + 50)))
def test_any_ids_in_any_order_decode(ids):
    texts = [TOKENIZER.decode([i]) for i in ids]
    assert TOKENIZER.decode(ids) == "".join(texts)


def test_the_longest_piece_wins_wherever_it_stands_in_the_list():
    pieces = ("ab", "abcd", "abc")
    tokenizer = CharTokenizer(pieces)
    assert tokenizer.encode("abcde") == [tokenizer.encode("abcd")[0], *tokenizer.encode("e")]
    assert len(tokenizer.encode("abcd")) == 1


def test_a_sum_with_its_answer_is_about_fifteen_tokens():
    prompt, answer = "What is 8 + 6 + 5 + 2?", "\\boxed{21}"
    assert len(TOKENIZER.encode(prompt)) + len(TOKENIZER.encode(answer)) + 1 <= 18


def test_control_ids_have_no_text_so_no_prompt_can_forge_one():
    """TK-10, for a tokenizer whose control ids have no spelling."""
    control = {TOKENIZER.pad_id, *TOKENIZER.eos_ids}
    assert not control & set(TOKENIZER.encode("<eos></s><pad>\\x00\\x01" + PRINTABLE))
    assert TOKENIZER.decode([*TOKENIZER.encode("7"), *control]) == "7"
    assert TOKENIZER.pad_id not in TOKENIZER.eos_ids


def test_the_ids_of_a_completion_are_not_those_of_its_text():
    """TK-05: `\\boxed{` as one piece or as letters is one text, so nothing may encode it again."""
    by_letters = [TOKENIZER.encode(letter)[0] for letter in "\\boxed{"]
    assert TOKENIZER.decode(by_letters) == "\\boxed{"
    assert TOKENIZER.encode(TOKENIZER.decode(by_letters)) != by_letters


@pytest.mark.parametrize("text", ["caf\u00e9", "7 \u2212 2", "a\tb", "\U0001f600"])
def test_other_characters_are_refused_by_name_and_place(text):
    place = next(i for i, c in enumerate(text) if c not in PRINTABLE)
    with pytest.raises(ValueError, match=f"at {place} of"):
        TOKENIZER.encode(text)


@pytest.mark.parametrize("pieces", [("a",), ("ab", "ab"), ("\u00e9t",)])
def test_pieces_that_cannot_be_pieces_are_refused(pieces):
    with pytest.raises(ValueError):
        CharTokenizer(pieces)


def test_the_fingerprint_tells_vocabularies_apart():
    """TK-13."""
    same, other = CharTokenizer(), CharTokenizer(("What is ", " + "))
    assert same.fingerprint == TOKENIZER.fingerprint != other.fingerprint
