"""What a run is: frozen typed models, YAML, flags, durations. Imports neither jax nor numpy."""

from jaxtrain.config.errors import ConfigError, NeedsPerson, UserError
from jaxtrain.config.load import dump, load, load_with_notes, parse_value, shipped
from jaxtrain.config.schema import RunConfig

__all__ = [
    "ConfigError",
    "NeedsPerson",
    "RunConfig",
    "UserError",
    "dump",
    "load",
    "load_with_notes",
    "parse_value",
    "shipped",
]
