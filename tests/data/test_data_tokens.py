"""Tokenizers: text -> numbers -> the same text; what cannot be said is an error, never another token."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from data_helpers import tokenizer_file
from tokenizers import models, pre_tokenizers, processors

from jaxtrain.config import ConfigError, UserError
from jaxtrain.data.tokens import Bytes, Characters, FileTokenizer, Tokenizer, code_points, from_json, normal

TEXT = "the naïve 😀 said:\n\t“𝔘, the end”\n\nother the\n"
KINDS = ("char", "byte", "file")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a tokenizer.json."""
    return tokenizer_file(tmp_path_factory.mktemp("tokens") / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def made(stored: str) -> dict[str, Tokenizer]:
    """One of each kind; the characters are those of TEXT."""
    return {"char": Characters("".join(sorted(set(TEXT)))), "byte": Bytes(), "file": FileTokenizer(stored)}


# ---------------------------------------------------------------- all kinds


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_as_it_was(kind: str, made: dict[str, Tokenizer]) -> None:
    tokens = made[kind].encode(TEXT)
    assert tokens.dtype == np.int32
    assert tokens.ndim == 1
    assert 0 <= tokens.min() <= tokens.max() < made[kind].size
    assert made[kind].decode(tokens) == TEXT
    assert made[kind].decode(tokens[::-1]) != TEXT  # the control
    assert made[kind].encode("").shape == (0,)
    assert made[kind].decode(made[kind].encode("")) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_all_line_ends_are_one_token(kind: str, made: dict[str, Tokenizer]) -> None:
    """A model trained on a file from one system is given a prompt from another."""
    lines = made[kind].encode("end\n\nother\nthe\n").tolist()
    assert made[kind].encode("end\r\n\r\nother\r\nthe\r\n").tolist() == lines
    assert made[kind].encode("end\r\rother\rthe\r").tolist() == lines
    assert made[kind].encode("end\n\r\nother\rthe\n").tolist() == lines
    assert made[kind].encode("end\n\n\nother\nthe\n").tolist() != lines  # the control: another empty line


def test_a_carriage_return_is_no_part_of_a_text() -> None:
    assert normal("a\r\nb\rc\n\rd\r\n") == "a\nb\nc\n\nd\n"
    assert code_points("\r\n").tolist() == [13, 10]  # the control: code_points alone keeps both


@pytest.mark.parametrize("kind", KINDS)
def test_plain_values_give_an_equal_tokenizer(kind: str, made: dict[str, Tokenizer]) -> None:
    before = made[kind]
    after = from_json(json.loads(json.dumps(before.to_json())))
    assert type(after) is type(before)
    assert after.to_json() == before.to_json()
    assert after.encode(TEXT).tolist() == before.encode(TEXT).tolist()
    assert (after.size, after.end) == (before.size, before.end)
    assert after.decode(after.encode(TEXT)) == TEXT


def test_the_kinds_do_not_read_each_others_tokens(made: dict[str, Tokenizer]) -> None:
    """The control of the round trips: three kinds are three encodings."""
    assert len({tuple(tokenizer.encode(TEXT).tolist()) for tokenizer in made.values()}) == 3
    assert len({json.dumps(tokenizer.to_json()) for tokenizer in made.values()}) == 3


# ---------------------------------------------------------------- characters


def test_characters_are_numbered_by_their_code_points() -> None:
    made = Characters("\nabé\uffff😀")
    assert made.size == 6
    assert made.end is None
    # A pair of UTF-16 surrogates would stand before U+FFFF, and be two tokens.
    assert made.encode("😀é\nba\uffff").tolist() == [5, 3, 0, 2, 1, 4]
    assert made.decode(np.array([5, 3, 0])) == "😀é\n"


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("abc", "'a'"),
        ("bcz", "'z'"),
        ("b😀", "'😀'"),
        ("zxb!😀x", "'!', 'x', 'z', '😀'"),
        ("b\tb\x00", r"'\x00', '\t'"),
        ("\udc80b", r"'\udc80'"),
    ],
    ids=["before", "behind", "beyond-16-bits", "several", "unseen", "surrogate"],
)
def test_each_unknown_character_is_named(text: str, listed: str) -> None:
    made = Characters("bcd")
    with pytest.raises(UserError) as caught:
        made.encode(text)
    assert str(caught.value).startswith(f"{listed}: the model has never seen ")
    assert str(caught.value).endswith("; it knows 3: 'bcd'")
    assert made.encode("bcd").tolist() == [0, 1, 2]  # the control


def test_the_error_of_one_unknown_character_is_one_sentence() -> None:
    with pytest.raises(UserError) as caught:
        Characters("bcd").encode("bad")
    assert str(caught.value) == "'a': the model has never seen this character; it knows 3: 'bcd'"


def test_one_unknown_character_that_comes_twice_is_still_one() -> None:
    with pytest.raises(UserError, match="'a': the model has never seen this character"):
        Characters("bcd").encode("baad")


def test_all_unknown_characters_are_one_token_of_their_own() -> None:
    made = Characters("bd", unknown=True)
    assert made.size == 3
    assert made.encode("abcde😀d").tolist() == [2, 0, 2, 1, 2, 2, 1]
    assert made.decode(np.array([2, 0, 1])) == "\ufffdbd"
    assert from_json(made.to_json()).encode("abcde").tolist() == [2, 0, 2, 1, 2]
    assert Characters("bd").size == 2  # the control
    with pytest.raises(UserError):
        from_json(Characters("bd").to_json()).encode("abcde")


# ---------------------------------------------------------------- bytes


def test_bytes_are_those_of_utf_8() -> None:
    made = Bytes()
    assert made.size == 256
    assert made.end is None
    assert made.encode("é😀\n").tolist() == [0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 10]
    assert made.decode(np.array([0xC3, 0xA9, 10])) == "é\n"
    assert made.decode(np.array([0xC3])) == "\ufffd"  # half a character: a model may stop there


def test_bytes_that_are_no_utf_8_are_kept() -> None:
    """pystdlib reads its files with surrogateescape, as the system gives the words of a command line."""
    every = bytes(b for b in range(256) if b != 13)
    text = every.decode("utf-8", "surrogateescape")
    assert "\udcff" in text
    assert bytes(Bytes().encode(text).tolist()) == every
    assert bytes(Bytes().encode(every.decode("utf-8", "replace")).tolist()) != every  # the control


@pytest.mark.parametrize("kind", ["byte", "file"])
def test_what_is_no_text_is_an_error_in_one_line(kind: str, made: dict[str, Tokenizer]) -> None:
    with pytest.raises(UserError, match=r"^'\\ud800' at place 1 is no character") as caught:
        made[kind].encode("a\ud800")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_file_refuses_a_byte_that_is_no_text(stored: str) -> None:
    with pytest.raises(UserError, match=r"^'\\udcff' at place 2 is no character"):
        FileTokenizer(stored).encode("ab\udcff")
    assert Bytes().encode("ab\udcff").tolist() == [97, 98, 255]  # the control


# ---------------------------------------------------------------- tokenizer.json


def test_a_tokenizer_file_gives_the_tokens_of_the_library(stored: str) -> None:
    made = FileTokenizer(stored)
    assert made.size == 1 + 256 + 3
    assert made.end == 0
    library = tokenizers.Tokenizer.from_str(stored)
    th, the, blank_the = (library.token_to_id(word) for word in ("th", "the", "\u0120the"))
    assert (th, the, blank_the) == (257, 258, 259)
    h, x = library.token_to_id("h"), library.token_to_id("x")
    assert made.encode("the the").tolist() == [the, blank_the]
    assert made.encode("xthx").tolist() == [x, th, x]
    assert made.encode("hx").tolist() == [h, x]
    assert made.encode("the<|endoftext|>the").tolist() == [the, 0, the]
    assert made.decode(np.array([the, 0, blank_the])) == "the<|endoftext|> the"


@pytest.mark.parametrize(
    ("specials", "end"),
    [((), None), (("<pad>",), None), (("<pad>", "</s>"), 1), (("[SEP]", "<|endoftext|>"), 1)],
    ids=["none", "another", "t5", "first-of-the-usual"],
)
def test_the_end_of_a_document_has_one_of_the_usual_names(specials: Any, end: int | None, tmp_path: Path) -> None:
    assert FileTokenizer(tokenizer_file(tmp_path / "t.json", specials).read_text()).end == end


def words(**vocabulary: int) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, **vocabulary}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_a_template_adds_nothing_to_a_text() -> None:
    """Of BERT's tokenizer: [CLS] and [SEP] would stand round the whole corpus."""
    library = words(a=1, b=2, C=3, S=4)
    library.post_processor = processors.TemplateProcessing(single="C $A S", special_tokens=[("C", 3), ("S", 4)])
    assert FileTokenizer(library.to_str()).encode("a b").tolist() == [1, 2]
    assert library.encode("a b").ids == [3, 1, 2, 4]  # the control


def test_a_tokenizer_file_for_sentences_cuts_no_text_off_and_fills_none_up() -> None:
    library = words(a=1, b=2)
    library.enable_truncation(3)
    library.enable_padding(length=5)
    made = FileTokenizer(library.to_str())
    assert made.encode("a b a b").tolist() == [1, 2, 1, 2]
    assert made.encode("a").tolist() == [1]


def test_the_size_counts_tokens_that_were_added() -> None:
    library = words(a=1)
    library.add_tokens(["new"])
    made = FileTokenizer(library.to_str())
    assert made.encode("a new").tolist() == [1, 2]
    assert made.size == 3
    assert library.get_vocab_size(with_added_tokens=False) == 2  # the control


def test_the_size_covers_the_greatest_token_where_numbers_are_left_out() -> None:
    made = FileTokenizer(words(a=1, b=700).to_str())
    assert made.encode("a b").tolist() == [1, 700]
    assert made.size == 701


def test_without_the_library_a_tokenizer_file_says_what_to_install(
    stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FileTokenizer(stored, "my.json")  # the control
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError) as caught:
        FileTokenizer(stored, "my.json")
    assert str(caught.value) == "my.json: a tokenizer.json needs the library: pip install 'jaxtrain[text]'"
    with pytest.raises(ConfigError, match=r"^the stored tokenizer: a tokenizer\.json needs the library"):
        from_json({"kind": "file", "text": stored})
    assert from_json({"kind": "byte"}).size == 256  # the others need no library


@pytest.mark.parametrize("content", ["", "{}", "hello", '{"model": {"type": "None"}}'])
def test_a_file_that_is_no_tokenizer_is_one_line(content: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: my\.json is no tokenizer\.json: .+") as caught:
        FileTokenizer(content, "my.json")
    assert "\n" not in str(caught.value)
