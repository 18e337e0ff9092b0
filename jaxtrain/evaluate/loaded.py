"""A saved step as a model to call, and as figures on a split.

Both come from the run folder alone: the config, the sealed arrays, and the data schema stored beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.build import build
from jaxtrain.checkpoint import Checkpoints, Sealed
from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.objectives import call_model
from jaxtrain.data.dataset import other_parts
from jaxtrain.data.make import other_data
from jaxtrain.data.schema import Schema
from jaxtrain.data.sources import ArraySource
from jaxtrain.hooks.folder import RunFolder, find_run
from jaxtrain.loop import Evaluation, evaluate
from jaxtrain.session import eval_batches
from jaxtrain.targets import Make, maker

log = logging.getLogger("jaxtrain")
SPLITS = ("train", "validation", "test")


class LoadedModel:
    """A trained model with its preprocessing. Call it on raw inputs [B, ...], as the data source gives them.

    Returns outputs in fp32: logits [B, C] ([B, T, V] for tokens), or values [B] / [B, K].
    weights: (params, model_state), flat dicts of arrays. step: the step they were saved at.
    """

    def __init__(self, module: ModuleDef, weights: tuple[Any, Any], schema: Schema, step: int) -> None:
        self.schema, self.step, self.weights = schema, step, weights
        self._module = module
        self._generator: Any = None
        preprocess = schema.preprocess()

        def forward(params: Any, model_state: Any, inputs: Any) -> Any:
            model = module.bind(params, model_state, None)
            mask = np.ones(inputs.shape[0], np.bool_)
            return call_model(model, {"inputs": preprocess(inputs), "mask": mask}, module.takes_mask)

        self._forward = jax.jit(forward)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of the outputs."""
        return self.schema.class_names

    def generate(
        self,
        prompt: str = "",
        tokens: int = 200,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """The continuation of a prompt by a language model; see `generate.Sampling` for the choice of tokens."""
        from jaxtrain.evaluate.generate import Generator, Sampling

        if self._generator is None:
            self._generator = Generator(self)
        return self._generator.generate(prompt, tokens, Sampling(temperature, top_k, top_p, seed))

    @property
    def has_cache(self) -> bool:
        """Whether the module can go on from a cache of keys and values (see `generate`)."""
        return all(hasattr(self.module, name) for name in ("empty_cache", "decode"))

    def bind(self, params: Any, model_state: Any) -> Any:
        """For use inside jit: the module in evaluation form with these arrays."""
        return self._module.bind(params, model_state, None)

    @property
    def module(self) -> Any:
        """The nnx.Module in evaluation form, for normalised inputs."""
        return self._module.bind(*self.weights, None)

    def __call__(self, inputs: Any) -> np.ndarray:
        inputs = np.asarray(inputs)
        if self.schema.task == "tokens" and inputs.ndim == 2 and inputs.shape[1] <= self.schema.input_shape[0]:
            return np.asarray(self._forward(*self.weights, inputs))  # a shorter text is a text
        if inputs.shape[1:] != self.schema.input_shape:
            raise ConfigError(
                f"inputs have shape {list(inputs.shape)}; allowed: [B, {', '.join(map(str, self.schema.input_shape))}]"
            )
        return np.asarray(self._forward(*self.weights, inputs))

    def predict(self, inputs: Any) -> list[str] | np.ndarray:
        """Class names for a classification, else the outputs."""
        outputs = self(inputs)
        if self.class_names is None:
            return outputs
        return [self.class_names[i] for i in outputs.argmax(-1)]


def load_model(run: str | Path, step: str | int = "best", *, model: Any = None) -> LoadedModel:
    """The model of a run at `step` (best, last, a number). `model`: rngs -> module, for a run whose model was
    given in Python. Reads no training data."""
    folder = find_run(run)
    config = load(folder.resolved)
    sealed = open_store(folder, config).get(step)
    schema = Schema.from_json(sealed.meta["schema"])
    module = ModuleDef(maker(config, schema, model))
    arrays = {"params": module.params, "model_state": module.model_state}
    return LoadedModel(module, _weights(folder, config, sealed, arrays), schema, sealed.step)


def evaluate_run(
    run: str | Path,
    split: str = "test",
    step: str | int = "best",
    *,
    model: Make | None = None,
    loss: Callable[..., Any] | None = None,
    source: ArraySource | None = None,
    path: str | Path | None = None,
) -> tuple[Evaluation, Sealed]:
    """Figures of a saved step on a split of the run's own data; or on `path`, which the run has never seen.

    path: data as data.path takes it, or an .npz with `inputs` and `targets`; of data that carries a test split that, of
    other data all. Its rows are encoded and normalised as the
    run's own were: the schema stored with the step holds, and the run's own data need not be there.
    """
    if path is not None:
        if split != "test":
            raise ConfigError(f"split {split!r} with path {str(path)!r}: other data has no such split; leave it out")
        return _evaluate_path(find_run(run), path, step, model, loss)
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not allowed; allowed: {', '.join(SPLITS)}")
    folder = find_run(run)
    job = build(load(folder.resolved), model=model, loss=loss, source=source)
    if not job.dataset.eval_rows(split):
        raise ConfigError(f"the {split} split of {folder.path} has no rows")
    sealed = open_store(folder, job.config).get(step)
    other = other_parts(sealed.meta["data"], job.dataset.fingerprint())
    if other:
        raise ConfigError(
            f"the data of {folder.path} has changed since step {sealed.step} was saved ({other}); bring it back"
        )
    weights = _weights(folder, job.config, sealed, job.abstract_state)
    return evaluate(job.eval_step, weights, eval_batches(job, split), job.metrics, keep_rows=True), sealed


def _evaluate_path(folder: RunFolder, path: str | Path, step: str | int, model: Any, loss: Any) -> Any:
    config = load(folder.resolved)
    sealed = open_store(folder, config).get(step)
    if not Path(path).exists():
        raise ConfigError(f"--path: {str(path)!r}: no such file or folder (looked in {Path(path).absolute().parent})")
    dataset = other_data(Path(path), config.data, Schema.from_json(sealed.meta["schema"]))
    for note in dataset.notes:  # what was left out of these figures
        log.warning("%s", note)
    job = build(config, model=model, loss=loss, dataset=dataset)
    weights = _weights(folder, config, sealed, job.abstract_state)
    return evaluate(job.eval_step, weights, eval_batches(job, "test"), job.metrics, keep_rows=True), sealed


def _weights(folder: RunFolder, config: RunConfig, sealed: Sealed, abstract: Mapping[str, Any]) -> tuple[Any, Any]:
    """(params, model_state) of a step, and nothing else of it; the averaged ones, where they were evaluated.

    abstract: their shapes, types and shardings (none: one device).
    """
    arrays: dict[str, Any] = {name: dict(abstract[name]) for name in ("params", "model_state")}
    store = open_store(folder, config)
    if config.train.ema_decay:
        arrays = store.restore_part(sealed, {"ema": arrays})["ema"]
    else:
        arrays = store.restore_part(sealed, arrays)
    return arrays["params"], arrays["model_state"]


def open_store(folder: RunFolder, config: RunConfig, **kept: int | None) -> Checkpoints:
    """The sealed steps of a run. kept: keep_last, keep_best, where others than the config's are wanted."""
    every = config.checkpoint.keep_every
    # In epochs: the steps say themselves that they stay.
    return Checkpoints.of_run(folder.checkpoints, config, every if isinstance(every, int) else 0, copied=False, **kept)
