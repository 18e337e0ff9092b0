"""Pure functions inside jit: state, step, precision, optimizer, objectives, metrics, guard, augment.

No I/O, no globals, nothing that changes. Imports nothing of jaxtrain but config's types.
"""
