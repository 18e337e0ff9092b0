"""Text: which files are read, how they are split, and in whose tokens. The rows: test_data_windows.py."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import text_of, tokenizer_file, written

from jaxtrain.config import ConfigError, UserError, load
from jaxtrain.data import text as text_module
from jaxtrain.data.make import make_dataset, other_data
from jaxtrain.data.text import MANY_FILES, TextDataset
from jaxtrain.data.tokens import FileTokenizer, from_json

SPLITS = ("train", "validation", "test")
WHOLE = (0.0, 0.0)


def files(folder: Path, **contents: str | bytes) -> Path:
    """Files of a folder; "__" is "/" in a name, and ".txt" is added."""
    for name, content in contents.items():
        path = folder / (name.replace("__", "/") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def all_of(dataset: TextDataset) -> str:
    return "".join(written(dataset, split) for split in SPLITS)


def sizes(dataset: TextDataset) -> tuple[int, ...]:
    return tuple(len(dataset.tokens[split]) for split in SPLITS)


def refused(path: Path, blocks: int = 8, parts: tuple[float, float] = (0.1, 0.1), **overrides: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        text_of(path, blocks, parts, **overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- fault cases


def test_fault_txt_crlf(shared: Path) -> None:
    """Four kinds of line ends: one text of 1,160 characters, one vocabulary, one fingerprint, so a run may go on."""
    folder = shared / "faults/txt_crlf"
    names = ("lf", "crlf", "cr_only", "mixed")
    made = {name: text_of(folder / f"{name}.txt", parts=(0.1, 0.0)) for name in names}
    plain = (folder / "lf.txt").read_bytes().decode()
    for dataset in made.values():
        assert sizes(dataset) == (1044, 116, 0)
        assert all_of(dataset) == plain
        assert dataset.schema.tokenizer == made["lf"].schema.tokenizer
        assert dataset.fingerprint() == made["lf"].fingerprint()
    characters = made["lf"].schema.tokenizer["characters"]  # type: ignore[index]
    assert characters == "".join(sorted(set(plain)))
    assert len(characters) <= 14
    assert "\r" not in characters
    raw = {name: len((folder / f"{name}.txt").read_bytes()) for name in names}
    assert raw == {"lf": 1160, "crlf": 1320, "cr_only": 1160, "mixed": 1252}  # the control


def test_fault_txt_crlf_in_prediction(shared: Path) -> None:
    folder = shared / "faults/txt_crlf"
    trained = text_of(folder / "lf.txt", parts=WHOLE)
    tokens = trained.tokens["train"]
    for name in ("crlf", "cr_only", "mixed"):
        assert other(folder / f"{name}.txt", trained).tokens["test"].tolist() == tokens.tolist()
    prompt = from_json(trained.schema.tokenizer or {}).encode("line one\r\nline two")
    assert prompt.tolist() == tokens[: len("line one\nline two")].tolist()


@pytest.mark.parametrize(
    ("name", "parts", "told"),
    [
        ("empty", (0.1, 0.1), "train 0, validation 0, test 0 of 0"),
        ("empty", (0.0, 0.0), "train 0 of 0"),
        ("ten_chars", (0.1, 0.1), "train 8, validation 1, test 1 of 10"),
        ("ten_chars", (0.0, 0.0), "train 10 of 10"),
        ("hundred", (0.1, 0.0), "train 90, validation 10 of 100"),
        ("hundred", (0.0, 0.1), "train 90, test 10 of 100"),
        ("exactly65", (0.1, 0.0), "train 58, validation 7 of 65"),
    ],
)
def test_fault_txt_empty_short(name: str, parts: tuple[float, float], told: str, shared: Path) -> None:
    """The message says how many tokens each split has, and how many it needs."""
    assert refused(shared / f"faults/txt_empty_short/{name}.txt", 64, parts) == (
        f"data.block_size: 64 needs 65 tokens in each split; {name}.txt has {told}; take a smaller block_size, "
        "more text, or set data.validation_fraction=0, data.test_fraction=0"
    )


def test_fault_txt_empty_short_exactly_one_window(shared: Path) -> None:
    path = shared / "faults/txt_empty_short/exactly65.txt"
    dataset = text_of(path, 64, WHOLE)
    assert [dataset.rows(split) for split in SPLITS] == [1, 0, 0]
    assert [dataset.eval_rows(split) for split in SPLITS] == [1, 0, 0]
    for epoch in range(5):
        batch = dataset.read("train", np.array([0], np.int32), epoch)
        assert batch["inputs"].tolist() == [[0] * 30 + [1] * 34]
        assert batch["targets"].tolist() == [[0] * 29 + [1] * 35]
    with pytest.raises(ConfigError):
        text_of(path, 65, WHOLE)  # the control
    assert text_of(shared / "faults/txt_empty_short/hundred.txt", 64, WHOLE).rows("train") == 1


def test_fault_txt_invalid_utf8(shared: Path) -> None:
    path = shared / "faults/txt_invalid_utf8/cp1252.txt"
    assert path.read_bytes()[:3] == b"It\x92"  # the third byte; EXPECT.txt counts from 1, we from 0, as Python does
    assert refused(path) == (
        f"{path}: byte 0x92 at offset 2 is not utf-8; set data.encoding (cp1252 is usual for old Windows files), "
        "or data.decode_errors=replace"
    )
    right = text_of(path, encoding="cp1252")
    assert all_of(right) == "It’s “fine” " + "abc " * 200
    assert right.notes == ()
    replaced = text_of(path, decode_errors="replace")
    assert all_of(replaced) == "It\ufffds \ufffdfine\ufffd " + "abc " * 200
    assert replaced.notes == ("3 bytes are not utf-8 and are read as U+FFFD",)
    assert sizes(replaced) == sizes(right) == (649, 81, 82)
    assert sum(sizes(right)) == 812


def test_fault_txt_unseen_char(shared: Path) -> None:
    folder, parts = shared / "faults/txt_unseen_char", (320 / 1520, 0.0)
    assert refused(folder, 8, parts, pattern="[tv]*.txt") == (
        "txt_unseen_char: validation has characters that the training part lacks: 'f', 'g'; "
        "set data.unknown=token to make them one token, or data.tokenizer=byte"
    )
    dataset = text_of(folder, 8, parts, pattern="[tv]*.txt", unknown="token")
    assert sizes(dataset) == (1200, 320, 0)
    assert dataset.schema.outputs == 7  # "\n", a to e, and all others
    assert dataset.tokens["validation"].tolist() == [1, 2, 3, 4, 5, 6, 6, 0] * 40
    assert dataset.notes == ("80 characters (2 different) of txt_unseen_char are unknown to its training part",)
    by_bytes = text_of(folder, 8, parts, pattern="[tv]*.txt", tokenizer="byte")
    assert written(by_bytes, "validation") == "abcdefg\n" * 40
    assert by_bytes.notes == ()
    alone = text_of(folder / "train.txt", 8, parts)  # the control
    assert (alone.schema.outputs, alone.notes) == (6, ())


@pytest.mark.parametrize("unknown", ["error", "token"])
def test_fault_txt_unseen_char_in_a_prompt(unknown: str, shared: Path) -> None:
    dataset = text_of(shared / "faults/txt_unseen_char/train.txt", unknown=unknown)
    tokenizer = from_json(dataset.schema.tokenizer or {})
    assert tokenizer.encode("e").tolist() == [5]
    if unknown == "token":
        assert tokenizer.encode("zez").tolist() == [6, 5, 6]
    else:
        with pytest.raises(UserError, match=r"^'z': the model has never seen this character"):
            tokenizer.encode("z")


# ---------------------------------------------------------------- split by position


def test_tiny_shakespeare_is_split_as_nanogpt_does(shared: Path) -> None:
    """data/shakespeare_char/prepare.py: 65 characters, 1,003,854 to train on and 111,540 to validate."""
    path = shared / "data/tinyshakespeare/input.txt"
    text, dataset = path.read_text(), text_of(path, 64, (0.1, 0.0))
    assert sizes(dataset) == (1_003_854, 111_540, 0)
    assert written(dataset, "train") == text[: int(len(text) * 0.9)]
    assert written(dataset, "validation") == text[int(len(text) * 0.9) :]
    numbers = {character: i for i, character in enumerate(sorted(set(text)))}
    assert dataset.schema.outputs == len(numbers) == 65
    assert dataset.tokens["train"][:1000].tolist() == [numbers[c] for c in text[:1000]]
    assert dataset.tokens["train"].dtype == np.uint8
    # nanoGPT's "hii there" is 46 47 47 1 58 46 43 56 43
    tokenizer = from_json(dataset.schema.tokenizer or {})
    assert tokenizer.encode("hii there").tolist() == [46, 47, 47, 1, 58, 46, 43, 56, 43]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((0.1, 0.1), (80, 10, 10)),
        ((0.4, 0.2), (40, 40, 20)),  # 100 * (1 - (0.4 + 0.2)) is 39.99999999999999
        ((0.2, 0.0), (80, 20, 0)),
        ((0.0, 0.33), (67, 0, 33)),
        ((0.0, 0.0), (100, 0, 0)),
    ],
)
def test_the_first_part_is_training_and_the_last_is_the_test(
    parts: tuple[float, float], expected: tuple[int, ...], tmp_path: Path
) -> None:
    dataset = text_of(files(tmp_path, a="0123456789" * 10), 4, parts)
    assert sizes(dataset) == expected
    assert all_of(dataset) == "0123456789" * 10
    moved = text_of(tmp_path, 4, parts, split_seed=1)
    assert [moved.tokens[s].tolist() for s in SPLITS] == [dataset.tokens[s].tolist() for s in SPLITS]


def test_the_vocabulary_comes_from_the_training_part_alone(tmp_path: Path) -> None:
    files(tmp_path, a="abc\n" * 20 + "xyz" * 7)
    dataset = text_of(tmp_path, 4, (0.0, 0.2), unknown="token")
    assert dataset.schema.tokenizer == {"kind": "char", "characters": "\nabc", "unknown": True}
    assert dataset.schema.outputs == 5
    assert written(dataset, "test") == "\ufffd" * 21
    assert text_of(tmp_path, 4, WHOLE).schema.outputs == 7  # the control


def test_both_splits_that_have_unknown_characters_are_named(tmp_path: Path) -> None:
    line = refused(files(tmp_path, a="ab" * 40 + "xa" * 5 + "ya" * 5))
    assert "validation and test has characters that the training part lacks: 'x', 'y'; set data.unknown=token" in line
    assert refused(files(tmp_path, a="ab" * 40 + "ab" * 5 + "ya" * 5)).startswith(f"{tmp_path.name}: test has ")


def test_no_character_is_taken_for_another(tmp_path: Path) -> None:
    """An unknown one lies before, between and behind those that are known."""
    dataset = text_of(files(tmp_path, a="bdf" * 30 + "abcdefg!😀b"), 4, (0.0, 0.1), unknown="token")
    assert written(dataset, "train") == "bdf" * 30
    assert written(dataset, "test") == "\ufffdb\ufffdd\ufffdf\ufffd\ufffd\ufffdb"
    assert dataset.notes == (f"6 characters (6 different) of {tmp_path.name} are unknown to its training part",)


# ---------------------------------------------------------------- split by file


def many(folder: Path, count: int, repeats: Any = lambda i: 100) -> Path:
    """File number i: the character 0x100 + i, so many times, and a line end."""
    return files(folder, **{f"f{i:02}": chr(0x100 + i) * repeats(i) + "\n" for i in range(count)})


def groups(dataset: TextDataset) -> list[list[int]]:
    """Which files each split has, each whole."""
    found = []
    for split in SPLITS:
        lines = [line for line in written(dataset, split).split("\n") if line]
        assert all(len(set(line)) == 1 for line in lines)
        found.append([ord(line[0]) - 0x100 for line in lines])
    return found


def test_whole_files_go_to_one_split(tmp_path: Path) -> None:
    dataset = text_of(many(tmp_path, 30), tokenizer="byte")
    found = groups(dataset)
    assert sorted(i for group in found for i in group) == list(range(30))
    assert [len(group) for group in found] == [24, 3, 3]
    assert all(group == sorted(group) for group in found)
    assert sizes(dataset) == (24 * 201, 3 * 201, 3 * 201)
    assert groups(text_of(tmp_path, tokenizer="byte", split_by="position"))[1] != found[1]  # the control
    # A model's test figure means something only while its test files stay out of training.
    assert found[1:] == [[4, 20, 27], [2, 6, 19]]


def test_the_split_of_files_is_stable_and_the_seed_moves_it(tmp_path: Path) -> None:
    before = groups(text_of(many(tmp_path / "a", 30), tokenizer="byte"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert groups(text_of(tmp_path / "b", tokenizer="byte")) == before
    assert groups(text_of(tmp_path / "b", tokenizer="byte", train__seed=7, blocks=16)) == before
    moved = groups(text_of(tmp_path / "b", tokenizer="byte", split_seed=1))
    assert moved != before
    assert sorted(i for group in moved for i in group) == list(range(30))


@pytest.mark.parametrize("parts", [(0.1, 0.1), (0.25, 0.05), (0.0, 0.3), (0.3, 0.0)])
def test_a_split_of_files_has_its_share_and_not_a_file_more(parts: tuple[float, float], tmp_path: Path) -> None:
    dataset = text_of(many(tmp_path, 40, lambda i: 20 + 7 * (i % 5)), parts=parts, tokenizer="byte")
    found, (_, *held) = groups(dataset), sizes(dataset)
    total = sum(sizes(dataset))
    for group, size, share in zip(found[1:], held, parts, strict=True):
        if not share:
            assert group == []
            continue
        largest = max(2 * (20 + 7 * (i % 5)) + 1 for i in group)
        assert share * total <= size < share * total + largest


def test_from_twenty_files_on_files_are_split(tmp_path: Path) -> None:
    assert MANY_FILES == 20
    few, enough = many(tmp_path / "few", 19), many(tmp_path / "enough", 20)
    whole = "".join(chr(0x100 + i) * 100 + "\n" for i in range(19))
    at = text_of(few, tokenizer="byte")
    assert "".join(written(at, s) for s in SPLITS) == whole  # by position: in order, and cut inside a file
    assert sizes(at) == (3055, 382, 382)
    assert [len(group) for group in groups(text_of(enough, tokenizer="byte"))] == [16, 2, 2]
    assert [len(group) for group in groups(text_of(few, tokenizer="byte", split_by="file"))] == [15, 2, 2]
    assert sizes(text_of(enough, tokenizer="byte", split_by="position")) == (3216, 402, 402)


def test_too_few_files_for_a_split_by_file_are_told_so(tmp_path: Path) -> None:
    files(tmp_path, a="abcdefgh" * 100, b="abcdefgh" * 100)
    assert refused(tmp_path, split_by="file") == (
        f"data.split_by=file: the 2 files of {tmp_path.name} leave none for train; add files, set "
        "data.validation_fraction=0 or data.test_fraction=0, or take data.split_by=position"
    )
    assert sorted(sizes(text_of(tmp_path, parts=(0.1, 0.0), split_by="file"))) == [0, 801, 801]  # the control


# ---------------------------------------------------------------- files into one text


def test_files_stand_in_the_order_of_their_paths_and_end_with_one_line_end(tmp_path: Path) -> None:
    files(tmp_path, b="two", a="one\n", c__a="three\r\n", d="four\r", c__b="five", e="six\n\n")
    assert written(text_of(tmp_path, 4, WHOLE), "train") == "one\ntwo\nthree\nfive\nfour\nsix\n\n"


def test_a_single_file_gets_no_line_end(tmp_path: Path) -> None:
    assert written(text_of(files(tmp_path, a="no end"), 4, WHOLE), "train") == "no end"
    assert written(text_of(files(tmp_path, a="an end\n"), 4, WHOLE), "train") == "an end\n"


def test_files_end_with_the_end_token_where_the_tokenizer_has_one(tmp_path: Path) -> None:
    files(tmp_path / "texts", a="the\n", b="the", c="")
    path = tokenizer_file(tmp_path / "t.json")
    dataset = text_of(tmp_path / "texts", 2, WHOLE, tokenizer=str(path))
    assert written(dataset, "train") == "the\n<|endoftext|>the<|endoftext|><|endoftext|>"
    assert dataset.tokens["train"].dtype == np.uint16
    endless = tokenizer_file(tmp_path / "endless.json", ())  # the control
    assert written(text_of(tmp_path / "texts", 2, WHOLE, tokenizer=str(endless)), "train") == "the\nthe\n\n"


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / ".corpus"  # above the path that was asked for, nothing counts as hidden
    files(folder, a="seen", b__c="seen too")
    hidden = files(folder, **{".hidden": "no", ".git__a": "no", "b__.git__a": "no"})
    (folder / "__MACOSX").mkdir()
    (folder / "__MACOSX/._a.txt").write_text("no")
    assert written(text_of(folder, 4, WHOLE), "train") == "seen\nseen too\n"
    assert written(text_of(hidden / ".hidden.txt", 1, WHOLE), "train") == "no"  # asked for by its name


def test_the_pattern_says_which_files(tmp_path: Path) -> None:
    files(tmp_path, a="text", deep__er__b="deep")
    (tmp_path / "a.md").write_text("mark")
    (tmp_path / "deep/c.md").write_text("down")
    (tmp_path / "folder.md").mkdir()
    found = {p: written(text_of(tmp_path, 3, WHOLE, pattern=p), "train") for p in ("*.txt", "*.md", "*", "deep/*")}
    assert found == {
        "*.txt": "text\ndeep\n",
        "*.md": "mark\ndown\n",
        "*": "mark\ntext\ndown\ndeep\n",
        "deep/*": "down",
    }


def test_nothing_to_read_is_one_line(tmp_path: Path) -> None:
    files(tmp_path, a="text")
    assert refused(tmp_path, pattern="*.rst") == f"data.path: no file '*.rst' (data.pattern) below {str(tmp_path)!r}"
    assert refused(tmp_path / "gone.txt") == (
        f"data.path: {str(tmp_path / 'gone.txt')!r}: no such file or folder (looked in {tmp_path}); "
        "say where it is: --data.path=..."
    )


def test_the_data_of_this_folder_have_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files(tmp_path / "corpus", a="text" * 50))
    assert text_of(Path("../corpus")).name == "corpus"  # the control
    assert text_of(Path(".")).name == "corpus"


def test_a_pattern_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    assert refused(files(tmp_path, a="text"), pattern="/*.txt").startswith("data.pattern: '/*.txt': ")


# ---------------------------------------------------------------- encodings


@pytest.mark.parametrize(("codec", "setting"), [("utf-8-sig", "utf-8"), ("utf-8-sig", "utf-8-sig"), ("utf-16",) * 2])
def test_a_byte_order_mark_is_no_character(codec: str, setting: str, tmp_path: Path) -> None:
    raw = "naïve 😀 text".encode(codec)
    assert raw[:2] in (b"\xef\xbb", b"\xff\xfe", b"\xfe\xff")  # the control: it is there
    dataset = text_of(files(tmp_path, a=raw, b=raw), 4, WHOLE, encoding=setting)
    assert written(dataset, "train") == "naïve 😀 text\n" * 2
    inside = text_of(files(tmp_path / "c", a="in\ufeffside"), 4, WHOLE)  # only at the beginning
    assert written(inside, "train") == "in\ufeffside"


def test_an_unknown_encoding_is_one_line(tmp_path: Path) -> None:
    line = refused(files(tmp_path, a="text"), encoding="utf8-bom")
    assert line == "data.encoding: 'utf8-bom' is not known; usual: utf-8, cp1252, latin-1"


def test_the_byte_that_is_wrong_is_named_behind_a_byte_order_mark(tmp_path: Path) -> None:
    files(tmp_path, a=b"\xef\xbb\xbfabc\x92d")
    assert "a.txt: byte 0x92 at offset 6 is not utf-8-sig;" in refused(tmp_path, encoding="utf-8-sig")


def test_only_what_was_replaced_is_counted(tmp_path: Path) -> None:
    """A file may have U+FFFD of its own."""
    files(tmp_path, a=b"ok \x92\x93 " + "\ufffd".encode(), b="\ufffd\ufffd\ufffd", c=b"\xff")
    dataset = text_of(tmp_path, 4, WHOLE, decode_errors="replace")
    assert written(dataset, "train") == "ok \ufffd\ufffd \ufffd\n\ufffd\ufffd\ufffd\n\ufffd\n"
    assert dataset.notes == ("3 bytes are not utf-8 and are read as U+FFFD",)
    assert text_of(tmp_path / "b.txt", 2, WHOLE, decode_errors="replace").notes == ()


@pytest.mark.parametrize("name", ["utf8", "UTF_8", "utf-16-le"])
def test_by_another_encoding_only_what_was_replaced_is_counted_too(name: str, tmp_path: Path) -> None:
    bad = {"utf-16-le": b"\x00\xdc"}.get(name, b"\x92")  # half a pair of surrogates
    files(tmp_path, a="ok \ufffd ".encode(name) + bad + bad + "\ufffd".encode(name))
    (note,) = text_of(tmp_path, 4, WHOLE, decode_errors="replace", encoding=name).notes
    assert note == f"2 bytes are not {name} and are read as U+FFFD"


# ---------------------------------------------------------------- tokenizers by name


def test_the_tokenizer_of_a_file_is_stored_with_the_schema(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "t.json")
    stored = path.read_text(encoding="utf-8")
    dataset = text_of(files(tmp_path, a="the end of the tale " * 40), 8, tokenizer=str(path))
    assert dataset.schema.tokenizer == {"kind": "file", "text": stored}
    assert dataset.schema.outputs == 260
    assert sizes(dataset) == (448, 56, 57)
    path.unlink()
    assert written(dataset, "train") == FileTokenizer(stored).decode(dataset.tokens["train"])
    assert all_of(dataset) == "the end of the tale " * 40
    plain = text_of(tmp_path / "a.txt", 8, tokenizer="byte")
    assert (sum(sizes(dataset)), sum(sizes(plain))) == (561, 800)  # the control: merges make it shorter


@pytest.mark.parametrize("name", ["chars", "gone.json", "."])
def test_another_tokenizer_is_one_line(name: str, tmp_path: Path) -> None:
    line = refused(files(tmp_path, a="text"), tokenizer=name)
    assert line == f"data.tokenizer: {name!r}: no such file; allowed: char, byte, or a tokenizer.json"


def test_a_tokenizer_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\x89PNG\xff")
    line = refused(files(tmp_path, a="text"), tokenizer=str(tmp_path / "model.bin"))
    assert line.startswith(f"data.tokenizer: {tmp_path / 'model.bin'} is no tokenizer.json: ")


# ---------------------------------------------------------------- other checks and figures


@pytest.mark.parametrize("kind", ["mse", "mae", "huber", "binary"])
def test_text_has_no_other_objective(kind: str, tmp_path: Path) -> None:
    assert refused(files(tmp_path, a="text" * 50), objective__kind=kind) == (
        f"objective.kind={kind} with data.kind=text: text is predicted token by token; allowed: cross_entropy, custom"
    )
    text_of(tmp_path, objective__kind="cross_entropy")  # the control


def test_the_schema_of_text(tmp_path: Path) -> None:
    schema = text_of(files(tmp_path, a="abcd" * 50), 16).schema
    assert (schema.task, schema.input_shape, schema.target_shape) == ("tokens", (16,), (16,))
    assert schema.input_dtype == "int32"
    assert (schema.outputs, schema.class_names, schema.mean, schema.image) == (4, None, None, None)
    assert type(schema).from_json(schema.to_json()) == schema
    tokens = schema.preprocess()(np.array([[3, 0]], np.uint8))  # type: ignore[arg-type]
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [[3, 0]])


def test_class_counts_are_of_the_training_tokens(tmp_path: Path) -> None:
    dataset = text_of(files(tmp_path, a="aab" * 60 + "bb" * 10), 4, (0.0, 0.1))
    assert dataset.class_counts().tolist() == [120, 60]
    unknown = text_of(tmp_path, 4, (0.0, 0.1), unknown="token")
    assert unknown.class_counts().tolist() == [120, 60, 0]


def test_overfitting_trains_and_evaluates_the_same_tokens(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 23) for i in range(1000))
    options = {"train__overfit_batches": 2, "train__global_batch_size": 4}
    dataset = text_of(files(tmp_path, a=text), 8, **options)
    assert dataset.tokens["train"].tolist() == dataset.tokens["validation"].tolist()
    assert text.startswith(written(dataset, "train"))
    assert 64 < sizes(dataset)[0] == sizes(dataset)[1] <= 72
    assert dataset.rows("test") == dataset.eval_rows("test") == 0
    assert dataset.notes == (f"overfitting {sizes(dataset)[0]} tokens: they are trained on and evaluated",)
    assert sizes(text_of(tmp_path, 8)) == (800, 100, 100)  # the control


@pytest.mark.parametrize(("batches", "size"), [(1, 4), (2, 4), (2, 1)])
def test_overfitting_has_as_many_rows_as_its_batches(batches: int, size: int, tmp_path: Path) -> None:
    options = {"train__overfit_batches": batches, "train__global_batch_size": size}
    assert text_of(files(tmp_path, a="abcdefgh" * 100), 8, **options).rows("train") == batches * size


def test_the_fingerprint_changes_with_text_tokens_split_and_block(tmp_path: Path) -> None:
    folder = many(tmp_path / "a", 24)
    common = {"tokenizer": "byte", "blocks": 16}
    first, second = tokenizer_file(tmp_path / "1.json"), tokenizer_file(tmp_path / "2.json", ("</s>",))
    shutil.copytree(folder, tmp_path / "touched")
    (tmp_path / "touched/f07.txt").write_text(chr(0x107) * 99 + "x\n")
    shutil.copytree(folder, tmp_path / "longer")
    (tmp_path / "longer/f24.txt").write_text("\n")
    prints = [
        text_of(folder, **common),
        text_of(tmp_path / "touched", **common),
        text_of(tmp_path / "longer", **common),
        text_of(folder, **(common | {"blocks": 17})),
        text_of(folder, **(common | {"tokenizer": str(first)})),
        text_of(folder, **(common | {"tokenizer": str(second)})),
        text_of(folder, **common, split_seed=1),
        text_of(folder, **common, split_by="position"),
        text_of(folder, **common, split_by="position", parts=(0.2, 0.1)),  # the same bytes, cut elsewhere
        text_of(folder, **common, parts=(0.2, 0.1)),
        text_of(folder, **common, train__overfit_batches=1),
        text_of(folder, 16, WHOLE, tokenizer="char"),
        text_of(folder, 16, WHOLE, tokenizer="char", unknown="token"),
    ]
    assert len({str(dataset.fingerprint()) for dataset in prints}) == len(prints)


def test_the_fingerprint_does_not_change_with_the_place_of_files(tmp_path: Path) -> None:
    folder = many(tmp_path / "a", 24)
    tokenizer = tokenizer_file(tmp_path / "1.json")
    before = text_of(folder, 16, tokenizer=str(tokenizer)).fingerprint()
    moved = shutil.copytree(folder, tmp_path / "elsewhere/b")
    copied = shutil.copy(tokenizer, tmp_path / "2.json")
    for options in ({}, {"train__seed": 5}, {"train__global_batch_size": 3}, {"feed": "direct"}):
        assert text_of(moved, 16, tokenizer=str(copied), **options).fingerprint() == before


# ---------------------------------------------------------------- the standard library


@pytest.fixture(scope="module")
def library() -> TextDataset:
    dataset = make_dataset(load({"data": {"kind": "pystdlib"}}))
    assert isinstance(dataset, TextDataset)
    return dataset


def test_the_standard_library_is_thousands_of_kilobytes_of_source(library: TextDataset) -> None:
    n = sum(sizes(library))
    assert n > 4_000_000
    train, validation, test = (size / n for size in sizes(library))
    assert 0.1 <= validation < 0.15
    assert 0.1 <= test < 0.15
    assert train > 0.7
    assert library.schema.outputs == 256
    assert library.schema.tokenizer == {"kind": "byte"}
    assert library.name == "pystdlib"
    assert all(tokens.dtype == np.uint8 for tokens in library.tokens.values())


def test_each_module_of_the_standard_library_is_whole_in_one_split(library: TextDataset) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    splits = {name: library.tokens[name].tobytes() for name in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    for name in sorted(path.name for path in root.glob("[a-z]*.py")):
        content = (root / name).read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if len(content) > 1000:
            (split,) = [name for name, text in splits.items() if content in text]
            counts[split] += 1
    assert counts["train"] > 100
    assert min(counts.values()) > 5
    assert not any(b"class TestSupport(" in text for text in splits.values())  # of test/test_support.py


def test_the_standard_library_is_the_same_text_again(library: TextDataset) -> None:
    again = make_dataset(load({"data": {"kind": "pystdlib"}}))
    assert again.fingerprint() == library.fingerprint()


def test_of_the_standard_library_only_its_own_source_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    left_out = ("test", "json/tests", "idlelib/idle_test", "site-packages/x", "dist-packages", "lib2to3", "turtledemo")
    for folder in (*left_out, "config-3.11-x86_64", "json", "email/mime"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "a.py").write_text(f"# {folder}\n")
    (tmp_path / "b.py").write_bytes(b"x = '\xe9\xff'\r\n")  # latin-1
    (tmp_path / "data.txt").write_text("no")
    (tmp_path / "b.pyc").write_text("no")
    whole = {"validation_fraction": 0.0, "test_fraction": 0.0}
    config = load({"data": {"kind": "pystdlib", "block_size": 4, **whole}})
    dataset = make_dataset(config)
    assert bytes(dataset.tokens["train"].tolist()) == b"x = '\xe9\xff'\n# email/mime\n# json\n"
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(ConfigError, match=r"^data\.kind=pystdlib: no source files below .*; this Python comes without"):
        make_dataset(config)


# ---------------------------------------------------------------- another text for a trained model


def other(path: Path, trained: TextDataset, **own: Any) -> TextDataset:
    """own: the fields of data that the model was trained with."""
    made = other_data(path, load({"data": {"kind": "text", "path": "where/it/was.txt", **own}}).data, trained.schema)
    assert isinstance(made, TextDataset)
    return made


def test_another_text_is_in_the_tokens_of_training(tmp_path: Path) -> None:
    trained = text_of(files(tmp_path / "a", a="bcdfbcdf\n" * 30), 8)
    files(tmp_path / "b", x="fdcb", y="b\r\n")
    made = other(tmp_path / "b", trained)
    assert trained.schema.tokenizer == {"kind": "char", "characters": "\nbcdf", "unknown": False}
    assert made.tokens["test"].tolist() == [4, 3, 2, 1, 0, 1, 0]
    assert sizes(made) == (0, 0, 7)
    assert made.schema == trained.schema
    assert made.name == "b"
    assert [made.rows(split) for split in SPLITS] == [0, 0, 0]
    assert [made.eval_rows(split) for split in SPLITS] == [0, 0, 1]
    own = text_of(tmp_path / "b", 2, WHOLE).tokens["train"].tolist()
    assert own == [4, 3, 2, 1, 0, 1, 0]
    files(tmp_path / "c", x="fdb")
    assert other(tmp_path / "c", trained).tokens["test"].tolist() == [4, 3, 1]
    assert text_of(tmp_path / "c", 2, WHOLE).tokens["train"].tolist() == [2, 1, 0]  # the control: tokens of its own


def test_block_and_tokenizer_of_the_schema_hold(tmp_path: Path) -> None:
    trained = text_of(files(tmp_path, a="bcdf\n" * 30), 4)
    made = other(tmp_path, trained, block_size=100, tokenizer="byte", unknown="token", validation_fraction=0.5)
    assert made.schema == trained.schema
    assert made.block == 4
    assert made.eval_rows("test") == 38
    assert written(made, "test") == "bcdf\n" * 30


def test_another_text_with_an_unseen_character_is_refused_or_one_token(tmp_path: Path) -> None:
    files(tmp_path / "a", a="bcdf\n" * 30)
    files(tmp_path / "b", a="bcexf")
    with pytest.raises(UserError, match=r"^'e', 'x': the model has never seen these characters; it knows 5: "):
        other(tmp_path / "b", text_of(tmp_path / "a", 4))
    made = other(tmp_path / "b", text_of(tmp_path / "a", 4, unknown="token"))
    assert made.tokens["test"].tolist() == [1, 2, 5, 5, 4]


def test_another_text_needs_no_tokenizer_file(tmp_path: Path) -> None:
    path = tokenizer_file(tmp_path / "t.json")
    trained = text_of(files(tmp_path / "a", a="the end\n" * 100), 4, tokenizer=str(path))
    path.unlink()
    made = other(tmp_path / "a", trained)
    assert made.tokens["test"].tolist() == np.concatenate([trained.tokens[split] for split in SPLITS]).tolist()


@pytest.mark.parametrize("content", ["", "b"])
def test_another_text_without_a_target_is_refused(content: str, tmp_path: Path) -> None:
    trained = text_of(files(tmp_path / "a", a="bcdf\n" * 30), 4)
    with pytest.raises(ConfigError) as caught:
        other(files(tmp_path / "b", short=content) / "short.txt", trained)
    assert str(caught.value) == f"short.txt: {len(content)} tokens; at least 2 are needed"
    files(tmp_path / "b", short="bc")
    assert other(tmp_path / "b/short.txt", trained).eval_rows("test") == 1  # the control


def test_another_text_is_read_as_the_text_of_training_was(tmp_path: Path) -> None:
    trained = text_of(files(tmp_path / "a", a="b’cdf\n" * 30), 4, unknown="token")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/a.md").write_bytes("b’c".encode("cp1252"))
    (tmp_path / "b/a.txt").write_bytes(b"dd\x92")
    made = other(tmp_path / "b", trained, pattern="*.md", encoding="cp1252")
    assert written(made, "test") == "b’c"
    replaced = other(tmp_path / "b", trained, decode_errors="replace")
    assert written(replaced, "test") == "dd\ufffd"
    assert replaced.notes == ("1 bytes are not utf-8 and are read as U+FFFD",)
    with pytest.raises(ConfigError, match="byte 0x92 at offset 2 is not utf-8"):
        other(tmp_path / "b", trained)  # the control


def test_a_model_of_the_standard_library_is_asked_about_a_text(tmp_path: Path, library: TextDataset) -> None:
    own = load({"data": {"kind": "pystdlib"}}).data
    made = other_data(files(tmp_path, a="def f():\r\n    pass\n") / "a.txt", own, library.schema)
    assert isinstance(made, TextDataset)
    assert bytes(made.tokens["test"].tolist()) == b"def f():\n    pass\n"
    assert made.block == library.block == 256


def test_what_is_no_text_is_no_text_for_a_language_model(tmp_path: Path) -> None:
    """Rows, of which a model of another kind would take an .npz."""
    trained = text_of(files(tmp_path / "a", a="bcdf\n" * 30), 4)
    np.savez(tmp_path / "rows.npz", inputs=np.full((4, 2), 1.7), targets=np.zeros(4))
    with pytest.raises(ConfigError, match=r"rows\.npz: byte 0x.. at offset \d+ is not utf-8"):
        other(tmp_path / "rows.npz", trained)
