"""A saved step as a model to call, and as figures on a split.

Both come from the run folder alone: the config, the sealed arrays, and the data schema stored beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.build import Make, build, maker
from jaxtrain.checkpoint import Checkpoints, Sealed
from jaxtrain.config import ConfigError, RunConfig, load
from jaxtrain.core.metrics import best_is
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.objectives import call_model
from jaxtrain.core.state import weights_for_evaluation
from jaxtrain.data.dataset import Schema
from jaxtrain.data.sources import ArraySource
from jaxtrain.hooks.folder import RunFolder, find_run
from jaxtrain.loop import Evaluation, evaluate
from jaxtrain.session import eval_batches

SPLITS = ("train", "validation", "test")


class LoadedModel:
    """A trained model with its preprocessing. Call it on raw inputs [B, ...], as the data source gives them.

    Returns outputs in fp32: logits [B, C], or values [B] / [B, K]. step: the step it was saved at.
    """

    def __init__(self, module: ModuleDef, weights: tuple[Any, Any], schema: Schema, step: int) -> None:
        self.schema, self.step = schema, step
        self._module, self._weights = module, weights
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

    @property
    def module(self) -> Any:
        """The nnx.Module in evaluation form, for normalised inputs."""
        return self._module.bind(*self._weights, None)

    def __call__(self, inputs: Any) -> np.ndarray:
        inputs = np.asarray(inputs)
        if inputs.shape[1:] != self.schema.input_shape:
            raise ConfigError(
                f"inputs have shape {list(inputs.shape)}; allowed: [B, {', '.join(map(str, self.schema.input_shape))}]"
            )
        return np.asarray(self._forward(*self._weights, inputs))

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
    sealed = _checkpoints(folder, config).get(step)
    schema = Schema.from_json(sealed.meta["schema"])
    module = ModuleDef(maker(config, schema, model))
    arrays = {"params": dict(module.params), "model_state": dict(module.model_state)}
    # The averaged weights are what was evaluated, where there are any.
    if config.train.ema_decay:
        restored = _checkpoints(folder, config).restore_part(sealed, {"ema": arrays})["ema"]
    else:
        restored = _checkpoints(folder, config).restore_part(sealed, arrays)
    return LoadedModel(module, (restored["params"], restored["model_state"]), schema, sealed.step)


def evaluate_run(
    run: str | Path,
    split: str = "test",
    step: str | int = "best",
    *,
    model: Make | None = None,
    loss: Callable[..., Any] | None = None,
    source: ArraySource | None = None,
) -> tuple[Evaluation, Sealed]:
    """Figures of a saved step on a split of the run's own data."""
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is not allowed; allowed: {', '.join(SPLITS)}")
    folder = find_run(run)
    job = build(load(folder.resolved), model=model, loss=loss, source=source)
    if not job.dataset.rows(split):
        raise ConfigError(f"the {split} split of {folder.path} has no rows")
    store = _checkpoints(folder, job.config)
    sealed = store.get(step)
    if sealed.meta["data"] != job.dataset.fingerprint():
        raise ConfigError(f"the data of {folder.path} has changed since step {sealed.step} was saved; bring it back")
    state = store.restore(sealed, job.abstract_state)
    weights = weights_for_evaluation(state)
    return evaluate(job.eval_step, weights, eval_batches(job, split), job.metrics, keep_rows=True), sealed


def _checkpoints(folder: RunFolder, config: RunConfig) -> Checkpoints:
    metric, mode = config.evaluate.metric, config.evaluate.mode
    return Checkpoints(folder.checkpoints, metric=metric, mode=best_is(metric) if mode == "auto" else mode)
