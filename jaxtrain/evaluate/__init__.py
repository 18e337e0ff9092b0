"""After the run: evaluate a saved step, load a saved model."""

from jaxtrain.evaluate.loaded import LoadedModel, evaluate_run, load_model

__all__ = ["LoadedModel", "evaluate_run", "load_model"]
