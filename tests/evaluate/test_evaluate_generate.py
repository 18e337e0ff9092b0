"""Sampling from a language model: with a cache and without, what may be chosen, text as it comes, wrong prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluate_helpers import BLOCK, RAIN, made_rows, text_config, train, words_of
from flax import nnx

import jaxtrain as jt
from jaxtrain.core.rng import stream_key
from jaxtrain.evaluate.generate import Generator, Sampling, pick

LONG = 3 * BLOCK
ACCENTS = "der häßliche 😀 kostet 5 € im märz\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, jt.LoadedModel]:
    """Rotary positions and characters; learned positions and bytes."""
    place = tmp_path_factory.mktemp("text")
    (place / "rain.txt").write_text(RAIN * 60)
    (place / "accents.txt").write_text(ACCENTS * 60, encoding="utf-8")
    rotary = text_config(place / "rain.txt", model={"positions": "rotary"})
    learned = text_config(
        place / "accents.txt",
        model={"positions": "learned", "norm": "layer", "activation": "gelu"},
        data={"tokenizer": "byte"},
    )
    for name, keys in (("rotary", rotary), ("learned", learned)):
        train(place / name, keys).close()
    return {name: jt.load_model(place / name) for name in ("rotary", "learned")}


PROMPTS = {"short": "the", "one": "s", "empty": "", "block": RAIN[:BLOCK], "long": RAIN * 3}
ACCENT_PROMPTS = {"short": "der", "one": "5", "empty": "", "block": ACCENTS[:BLOCK], "long": ACCENTS * 3}
SAMPLINGS = [
    Sampling(temperature=0),
    *(Sampling(seed=seed) for seed in (0, 1, 2**32 - 1)),
    Sampling(top_k=3, seed=3),
    Sampling(top_p=0.7, seed=4),
    Sampling(temperature=1.7, top_k=6, top_p=0.9, seed=5),
]


def prompts_of(name: str) -> dict[str, str]:
    return PROMPTS if name == "rotary" else ACCENT_PROMPTS


def by_hand(model: jt.LoadedModel, tokens: list[int], count: int, sampling: Sampling) -> list[int]:
    """The rule of the docs, with the whole model for every token: of a full context the older half is dropped."""
    context, made = tokens[-BLOCK:], []
    for number in range(count):
        if len(context) > BLOCK:
            context = context[-BLOCK // 2 :]
        row = np.full((1, BLOCK), 1)  # what stands behind a token is not seen by it
        row[0, : len(context)] = context
        logits = model(row)[0, len(context) - 1]
        key = stream_key(sampling.seed, "sample", number)
        made.append(int(pick(logits, key, sampling.temperature, sampling.top_k, sampling.top_p)))
        context = [*context, made[-1]]
    return made


# ---------------------------------------------------------------- the cache


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("name", ["rotary", "learned"])
def test_tokens_with_a_cache_are_those_without(
    name: str, sampling: Sampling, models: dict[str, jt.LoadedModel]
) -> None:
    model, prompt = models[name], prompts_of(name)["short"]
    cached, whole = Generator(model), Generator(model, cache=False)
    assert (cached._cached, whole._cached) == (True, False)
    tokens = list(cached.stream(prompt, LONG, sampling))
    assert len(tokens) == LONG
    assert tokens == list(whole.stream(prompt, LONG, sampling))
    others = [dataclasses.replace(sampling, seed=(sampling.seed + n) % 2**32) for n in (1, 2, 3, 4)]
    differs = any(list(cached.stream(prompt, LONG, other)) != tokens for other in others)
    assert differs == (sampling.temperature > 0)  # the control: the likeliest token needs no seed


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", ["rotary", "learned"])
def test_every_prompt_is_continued_by_the_rule_of_the_docs(
    name: str, kind: str, models: dict[str, jt.LoadedModel]
) -> None:
    model, prompt = models[name], prompts_of(name)[kind]
    generator = Generator(model)
    given = generator.tokenizer.encode(prompt or "\n").tolist()
    for sampling in (SAMPLINGS[0], SAMPLINGS[1]):
        tokens = list(generator.stream(prompt, LONG, sampling))
        assert tokens == by_hand(model, given, LONG, sampling)
        assert tokens == list(Generator(model, cache=False).stream(prompt, LONG, sampling))
    likeliest = list(generator.stream(prompt, 8, Sampling(temperature=0)))
    other = by_hand(model, generator.tokenizer.encode("n ä" if name == "learned" else "n th").tolist(), 8, SAMPLINGS[0])
    assert likeliest != other  # the control: the prompt is read


def test_a_prompt_longer_than_the_block_is_its_end(models: dict[str, jt.LoadedModel]) -> None:
    generator = Generator(models["rotary"])
    long, end = RAIN * 3 + "the ra", (RAIN * 3 + "the ra")[-BLOCK:]
    for sampling in SAMPLINGS[:2]:
        assert generator.generate(long, LONG, sampling) == generator.generate(end, LONG, sampling)
    assert generator.generate(end[1:] + "y", 8, SAMPLINGS[0]) != generator.generate(end, 8, SAMPLINGS[0])


def test_the_text_that_was_trained_on_is_continued(models: dict[str, jt.LoadedModel]) -> None:
    assert models["rotary"].generate("the rain", 20, temperature=0) == RAIN[8:28]
    assert models["rotary"].generate("the rain", 20, temperature=50.0, seed=1) != RAIN[8:28]  # the control


def test_keyword_arguments_are_those_of_sampling(models: dict[str, jt.LoadedModel]) -> None:
    model = models["rotary"]
    same = Generator(model).generate("the", 30, Sampling(0.9, 5, 0.8, 11))
    assert model.generate("the", 30, temperature=0.9, top_k=5, top_p=0.8, seed=11) == same
    assert model.generate("the", 30, temperature=0.9, top_k=5, top_p=0.8, seed=12) != same
    assert len(model.generate("the", 1)) == 1


def test_few_programs_are_compiled(models: dict[str, jt.LoadedModel]) -> None:
    """Prompts of 1 to 16 tokens: one program a power of two, and one for every single token."""
    generator = Generator(models["rotary"])
    for length in range(1, BLOCK + 1):
        generator.generate(RAIN[:length], 2, SAMPLINGS[0])
    assert generator._fill._cache_size() == len([1, 2, 4, 8, 16])
    assert generator._next._cache_size() == 1


# ---------------------------------------------------------------- the choice of a token

LOGITS = np.random.default_rng(5).normal(size=12).astype(np.float32) * 1.2
DRAWS = 20_000


def expected(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities [V], by sorting in float64: the definition, token by token."""
    wide = logits.astype(np.float64)
    powers = np.exp(wide / temperature - (wide / temperature).max())
    share = powers / powers.sum()
    kept, mass = [], 0.0
    for token in sorted(range(len(wide)), key=lambda t: (-wide[t], t)):
        if (top_k and len(kept) == top_k) or mass >= top_p:
            break
        kept.append(token)
        mass += share[token]
    allowed = np.zeros(len(wide))
    allowed[kept] = share[kept]
    return allowed / allowed.sum()


def drawn(logits: np.ndarray, temperature: float, top_k: int, top_p: float, draws: int = DRAWS) -> np.ndarray:
    """How often each token comes, over many keys."""
    keys = jax.random.split(jax.random.key(17), draws)
    tokens = jax.vmap(lambda key: pick(jnp.asarray(logits), key, temperature, top_k, top_p))(keys)
    return np.bincount(np.asarray(tokens), minlength=len(logits))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (1, 1.0), (99, 1.0), (0, 0.6), (0, 1e-6), (5, 0.8)])
def test_tokens_come_as_often_as_the_definition_says(temperature: float, top_k: int, top_p: float) -> None:
    wanted = expected(LOGITS, temperature, top_k, top_p)
    counts = drawn(LOGITS, temperature, top_k, top_p)
    assert counts.sum() == DRAWS
    assert (counts[wanted == 0] == 0).all()  # not one token outside the set
    likely = wanted * DRAWS > 30
    assert (counts[likely] > 0).all()
    error = np.sqrt(wanted * (1 - wanted) * DRAWS)
    assert (np.abs(counts - wanted * DRAWS) <= 5 * error + 1e-9).all()


def test_the_set_is_what_top_k_and_top_p_leave() -> None:
    """The control of the test above: each narrows the choice, and both together take the smaller set."""
    sizes = {
        (k, p): int((expected(LOGITS, 1.0, k, p) > 0).sum())
        for k, p in [(0, 1.0), (5, 1.0), (0, 0.6), (5, 0.6), (2, 0.6)]
    }
    assert sizes[0, 1.0] == 12
    assert sizes[5, 1.0] == 5
    assert 2 < sizes[0, 0.6] == sizes[5, 0.6] < 5
    assert sizes[2, 0.6] == 2
    one = drawn(LOGITS, 1.0, 3, 1.0)
    other = expected(LOGITS, 1.0, 0, 1.0)
    assert (np.abs(one - other * DRAWS) > 5 * np.sqrt(other * (1 - other) * DRAWS)).any()


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-3, 1e-30, 1e-45])
def test_the_limit_of_temperature_is_the_likeliest_token(temperature: float) -> None:
    counts = drawn(LOGITS, temperature, 0, 1.0, 500)
    assert counts[LOGITS.argmax()] == 500
    assert drawn(LOGITS, 1.0, 0, 1.0, 500)[LOGITS.argmax()] < 500  # the control


def test_a_high_temperature_knows_no_preference() -> None:
    counts = drawn(LOGITS, 1e6, 0, 1.0)
    np.testing.assert_allclose(counts, DRAWS / 12, atol=5 * np.sqrt(DRAWS / 12))


def test_of_equal_logits_the_first_is_the_likeliest() -> None:
    tied = np.array([0.0, 3.0, 3.0, 1.0, 3.0], np.float32)
    key = jax.random.key(0)
    assert int(pick(tied, key, 0.0, 0, 1.0)) == 1
    assert set(np.flatnonzero(drawn(tied, 1.0, 2, 1.0, 500))) == {1, 2}


# ---------------------------------------------------------------- text as it comes


@pytest.mark.parametrize("name", ["rotary", "learned"])
@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_are_the_text(name: str, seed: int, models: dict[str, jt.LoadedModel]) -> None:
    generator, sampling = Generator(models[name]), Sampling(temperature=1.5, seed=seed)
    whole = generator.generate("5 ", 60, sampling) if name == "learned" else generator.generate("s", 60, sampling)
    pieces = list(generator.pieces("5 " if name == "learned" else "s", 60, sampling))
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 20  # it comes in pieces


class Spoken(Generator):
    """Says the bytes of a text."""

    def __init__(self, model: jt.LoadedModel, content: bytes) -> None:
        super().__init__(model)
        self._content = content

    def stream(self, prompt: str, tokens: int, sampling: Sampling = SAMPLINGS[0]) -> Iterator[int]:
        yield from self._content


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ("aß€😀b".encode(), ["a", "ß", "€", "😀", "b"]),
        (b"\xe2\x82", ["\N{REPLACEMENT CHARACTER}"]),  # cut in the middle: told at the end
        (b"\xe2\x82A", ["\N{REPLACEMENT CHARACTER}A"]),
        ("\N{REPLACEMENT CHARACTER}x".encode(), ["\N{REPLACEMENT CHARACTER}x"]),
        (b"", []),
    ],
)
def test_half_a_character_is_held_back(content: bytes, pieces: list[str], models: dict[str, jt.LoadedModel]) -> None:
    spoken = list(Spoken(models["learned"], content).pieces("", len(content)))
    assert [piece for piece in spoken if piece] == pieces


# ---------------------------------------------------------------- characters that training never saw


def test_fault_txt_unseen_char(shared: Path, tmp_path: Path) -> None:
    """An unseen character of a prompt or of another text is named, or is the unknown token; it is never another one."""
    case = shared / "faults/txt_unseen_char"
    config = text_config(case / "train.txt", model={"layers": 1, "width": 8}, data={"block_size": 8}, duration=20)
    train(tmp_path / "error", config).close()
    model = jt.load_model(tmp_path / "error")
    assert model.schema.tokenizer == {"kind": "char", "characters": "\nabcde", "unknown": False}
    with pytest.raises(jt.UserError, match=r"^'z': the model has never seen this character; it knows 6: '\\nabcde'$"):
        model.generate("az", 5)
    with pytest.raises(jt.UserError, match=r"^'f', 'g': the model has never seen these characters; it knows 6: "):
        jt.evaluate_run(tmp_path / "error", path=case / "val.txt")
    assert len(model.generate("ae", 5)) == 5  # the control
    train(tmp_path / "token", config, **{"data.unknown": "token"}).close()
    model = jt.load_model(tmp_path / "token")
    tokenizer = Generator(model).tokenizer
    assert tokenizer.encode("abcdez\n").tolist() == [1, 2, 3, 4, 5, 6, 0]
    unseen, last = (model(tokenizer.encode(text)[None])[0, -1] for text in ("z", "e"))
    assert unseen.shape == (7,)
    assert np.abs(unseen - last).max() > 1e-3
    figures = jt.evaluate_run(tmp_path / "token", path=case / "val.txt")[0].figures
    assert np.isfinite(figures["loss"])
    assert figures["accuracy"] < 1


# ---------------------------------------------------------------- a user's own module


class Bigram(nnx.Module):
    """[B, T] bytes -> [B, T, 256] by the last byte alone."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(256, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens)


class Recurrent(Bigram):
    """The same with a cache that it counts in, and a decode that says something else: the byte after the likeliest."""

    def empty_cache(self, rows: int) -> jax.Array:
        return jnp.zeros((rows,), jnp.int32)

    def decode(self, tokens: jax.Array, cache: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.roll(self.table(tokens), 1, -1), cache + tokens.shape[1]


def test_a_module_of_ones_own_is_sampled_without_a_cache(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("abcdefgh" * 80)
    config = {**text_config(tmp_path / "own.txt", data={"tokenizer": "byte"}), "optimizer": {"peak_lr": 0.3}}
    train(tmp_path / "run", config, model=lambda rngs: Bigram(rngs)).close()
    model = jt.load_model(tmp_path / "run", model=lambda rngs: Bigram(rngs))
    assert model.has_cache is False
    assert Generator(model)._cached is False
    assert model.generate("abc", 20, temperature=0) == "defghabcdefghabcdefg"
    assert "".join(Generator(model).pieces("c", 4, SAMPLINGS[0])) == "defg"
    with_cache = jt.load_model(tmp_path / "run", model=lambda rngs: Recurrent(rngs))
    assert with_cache.has_cache is True
    assert with_cache.generate("a", 4, temperature=0) == "cegi"[:3] + with_cache.generate("g", 1, temperature=0)
    assert Generator(with_cache, cache=False).generate("a", 4, SAMPLINGS[0]) == "bcde"


# ---------------------------------------------------------------- what is refused

WRONG = [
    ({"temperature": -0.1}, "--temperature: -0.1 is not allowed; allowed: 0 (the likeliest) or more"),
    ({"temperature": float("nan")}, "--temperature: nan is not allowed; allowed: 0 (the likeliest) or more"),
    ({"temperature": float("inf")}, "--temperature: inf is not allowed; allowed: 0 (the likeliest) or more"),
    ({"top_k": -1}, "--top-k: -1 is not allowed; allowed: 0 (all) or more"),
    ({"top_p": 0.0}, "--top-p: 0.0 is not allowed; allowed: above 0, up to 1 (all)"),
    ({"top_p": 1.01}, "--top-p: 1.01 is not allowed; allowed: above 0, up to 1 (all)"),
    ({"top_p": float("nan")}, "--top-p: nan is not allowed; allowed: above 0, up to 1 (all)"),
    ({"seed": -1}, "--seed: -1 is not allowed; allowed: 0 to 4294967295"),
    ({"seed": 2**32}, "--seed: 4294967296 is not allowed; allowed: 0 to 4294967295"),
]


@pytest.mark.parametrize(("values", "line"), WRONG, ids=[line for _, line in WRONG])
def test_a_choice_that_cannot_be_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(jt.ConfigError) as caught:
        Sampling(**values)
    assert str(caught.value) == line


def test_the_ends_of_what_is_allowed_are_taken(models: dict[str, jt.LoadedModel]) -> None:
    for sampling in (Sampling(0, 0, 1.0, 0), Sampling(1e9, 10**6, 1e-9, 2**32 - 1)):
        assert len(Generator(models["rotary"]).generate("the", 3, sampling)) == 3


def test_a_run_that_is_no_language_model_refuses_prompts(tmp_path: Path) -> None:
    inputs, values = made_rows()
    train(tmp_path / "run", data=(inputs, words_of(values)), **{"train.duration": 2}).close()
    model = jt.load_model(tmp_path / "run")
    line = "this run is no language model: it has no tokenizer; give it files or arrays, not a prompt"
    for ask in (lambda: Generator(model), lambda: model.generate("the")):
        with pytest.raises(jt.UserError) as caught:
            ask()
        assert str(caught.value) == line
    assert model(inputs[:2]).shape == (2, 3)  # the control
