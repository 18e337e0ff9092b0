"""jaxtrain: train JAX/Flax models. One config trains, checkpoints, resumes and evaluates, exactly.

Importing this module starts no backend and imports neither jax nor flax; the names below load when used.
"""

__version__ = "0.1.0"
