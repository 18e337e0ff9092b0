"""Text from a language model: a token at a time, by temperature, top-k and top-p, from a seed.

A model that has `empty_cache` and `decode` (as `gpt`) keeps keys and values; any other is called on the whole context
again. Both give the same tokens: the context is cut by one rule. When it is full (block_size tokens) its older half is
dropped, so that a cache is filled anew once in half a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.errors import ConfigError, UserError
from jaxtrain.core.rng import stream_key
from jaxtrain.data.tokens import UNKNOWN, from_json
from jaxtrain.evaluate.loaded import LoadedModel


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token. top_k: of so many only, 0 = all. top_p: of the likeliest ones that
    together have this probability (Holtzman et al. 2020). Raises ConfigError for values that cannot be."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, right, allowed in (
            ("temperature", self.temperature, 0 <= self.temperature < float("inf"), "0 (the likeliest) or more"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "above 0, up to 1 (all)"),
            ("seed", self.seed, 0 <= self.seed < 2**32, "0 to 4294967295"),
        ):
            if not right:
                raise ConfigError(f"--{name}: {value} is not allowed; allowed: {allowed}")


class Generator:
    """Continues texts with a language model that was loaded. cache=False calls the whole model for every token."""

    def __init__(self, model: LoadedModel, *, cache: bool = True) -> None:
        if model.schema.tokenizer is None:
            raise UserError("this run is no language model: it has no tokenizer; give it files or arrays, not a prompt")
        self.tokenizer = from_json(model.schema.tokenizer)
        self._model, self._block = model, model.schema.input_shape[0]
        self._cached = cache and model.has_cache
        self._fill, self._next = jax.jit(self._prefill), jax.jit(self._decode, donate_argnums=2)

    def generate(self, prompt: str, tokens: int, sampling: Sampling = Sampling()) -> str:
        """The continuation of `prompt` by so many tokens."""
        return self.tokenizer.decode(np.array(list(self.stream(prompt, tokens, sampling)), np.int64))

    def pieces(self, prompt: str, tokens: int, sampling: Sampling = Sampling()) -> Iterator[str]:
        """The same text as it comes. What may still change (half of a UTF-8 character) is held back until the end."""
        made: list[int] = []
        said = 0
        for token in self.stream(prompt, tokens, sampling):
            made.append(token)
            text = self.tokenizer.decode(np.array(made))
            if not text.endswith(UNKNOWN):
                yield text[said:]
                said = len(text)
        yield self.tokenizer.decode(np.array(made))[said:]

    def stream(self, prompt: str, tokens: int, sampling: Sampling = Sampling()) -> Iterator[int]:
        """The tokens of the continuation, one by one. Raises UserError for a prompt that the tokenizer cannot say."""
        text = self.tokenizer.encode(prompt or "\n").tolist()
        cache, known = None, 0  # the cache holds the first `known` tokens of the context
        context = text[-self._block :]
        for number in range(tokens):
            if len(context) > self._block:
                context, cache = context[-(self._block // 2 or 1) :], None
            if not self._cached:
                logits = self._model(self._pad(context))[0, len(context) - 1]
            elif cache is None:
                logits, cache = self._fill(*self._model.weights, self._pad(context), len(context))
                known = len(context)
            else:
                logits, cache = self._next(*self._model.weights, cache, context[-1], known)
                known += 1
            key = stream_key(sampling.seed, "sample", number)
            token = int(pick(logits, key, sampling.temperature, sampling.top_k, sampling.top_p))
            context.append(token)
            yield token

    def _pad(self, context: list[int]) -> np.ndarray:
        """[1, P]: filled up behind to a power of two, so that few programs are compiled; a token sees none after it."""
        size = min(1 << (len(context) - 1).bit_length(), self._block)
        return np.array([context + [0] * (size - len(context))], np.int32)

    def _prefill(self, params: Any, model_state: Any, tokens: Any, length: Any) -> Any:
        model = self._model.bind(params, model_state)
        logits, cache = model.decode(tokens, model.empty_cache(1), 0)
        return logits[0, length - 1], cache

    def _decode(self, params: Any, model_state: Any, cache: Any, token: Any, at: Any) -> Any:
        logits, cache = self._model.bind(params, model_state).decode(jnp.reshape(token, (1, 1)), cache, at)
        return logits[0, -1], cache


@jax.jit
def pick(logits: Any, key: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """A token by its logits [V]. Ties and order as in a stable sort from the likeliest down."""
    order = jnp.argsort(-logits, stable=True)
    ranked = jax.nn.log_softmax(logits[order] / jnp.where(temperature > 0, temperature, 1.0))
    rank = jnp.arange(len(logits))
    before = jnp.cumsum(jnp.exp(ranked)) - jnp.exp(ranked)
    allowed = ((rank < top_k) | (top_k == 0)) & (before < top_p)  # nothing is before the likeliest
    drawn = jax.random.categorical(key, jnp.where(allowed, ranked, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)]
