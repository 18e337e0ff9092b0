"""Numbers in words, and amounts of memory as people write them."""

from __future__ import annotations

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.plan.units import GIB, MIB, of_bytes, of_seconds, si, to_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (3 * MIB // 2, "1.5 MiB"),
        (100 * MIB, "100 MiB"),
        (1288490189, "1.2 GiB"),
    ],
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert of_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 * GIB), ("7.5 GB", 15 * GIB // 2), ("512M", 512 * MIB), ("1tib", 1024 * GIB), ("4096", 4096)],
)
def test_memory_as_people_write_it(text: str, count: int) -> None:
    assert to_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "8 GiBs", "-1GiB", "0", "1e9"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        to_bytes(text)
    assert str(error.value) == (
        f"{text!r} is no amount of memory; allowed: a number with MiB, GiB or TiB, such as 8GiB"
    )


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 "), (999, "999 "), (12345678, "12.3 M"), (2.5e15, "2.5 P"), (131e6, "131 M")]
)
def test_numbers_with_their_letter(number: float, text: str) -> None:
    assert si(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2e-6, "2 us"),
        (0.00123, "1.2 ms"),
        (0.25, "250 ms"),
        (59, "59 s"),
        (90, "1.5 min"),
        (5000, "1.4 h"),
        (864000, "10 days"),
    ],
)
def test_seconds_in_words(seconds: float, text: str) -> None:
    assert of_seconds(seconds) == text
