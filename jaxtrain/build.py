"""build(config) -> Job: dataset, module, abstract state, shardings, the jitted functions. Nothing is run or allocated.

What needs the data to be checked (shapes, classes, names of metrics, divisibility) is checked here, so that a wrong
config ends before the first compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain import resolve
from jaxtrain.config import RunConfig, schema
from jaxtrain.config.errors import UserError
from jaxtrain.core.cost import Cost, flops_of
from jaxtrain.core.metrics import METRICS, Metrics
from jaxtrain.core.module import ModuleDef
from jaxtrain.core.objectives import LossFn, Objective, built_in_loss, call_model, make_objective, user_loss
from jaxtrain.core.optimizer import make_optimizer
from jaxtrain.core.precision import Precision, cast_floats
from jaxtrain.core.schedules import make_schedule
from jaxtrain.core.state import State, init_state
from jaxtrain.core.step import StepSpec, make_eval_step, make_train_step, step_cost
from jaxtrain.data import feed
from jaxtrain.data.dataset import class_weights
from jaxtrain.data.make import Data, make_dataset
from jaxtrain.data.sources import ArraySource
from jaxtrain.hardware.compiler import compiler_options, run_once_options
from jaxtrain.hardware.devices import Devices, available, resolve_precision
from jaxtrain.parallel import mesh as meshes
from jaxtrain.parallel import offload, processes, rules
from jaxtrain.parallel.placed import Placed
from jaxtrain.resolve import Steps
from jaxtrain.targets import Make, load_target, maker


@dataclass(frozen=True)
class Job:
    """A run that has not begun.

    advance(state, fed) -> (state, metrics): jitted, the state is donated; `fed` is what the feeder gives.
    advance_many(state, fed, count) -> the same after `count` steps, for rows on the device: a loop inside the program.
    eval_step(params, model_state, batch) -> mergeable metric state: jitted.
    init() -> State, on the devices, in its shardings; init({"params": {..}, "model_state": {..}}): with these arrays.
    plain: the module as on one device. abstract_state: shapes, dtypes and shardings of the state.
    notes: lines that a user should see once. remake(config): the same data, model and loss by another config.
    """

    config: RunConfig
    dataset: Data
    devices: Devices
    mesh: Any
    module: ModuleDef
    plain: ModuleDef
    spec: StepSpec
    metrics: Metrics | None
    steps: Steps
    feed_kind: str
    eval_batch: int
    mode: str
    abstract_state: State
    init: Callable[..., State]
    advance: Callable[..., Any]
    advance_many: Callable[..., Any]
    eval_step: Callable[..., Any]
    notes: tuple[str, ...]
    remake: Callable[[RunConfig], Job]

    @property
    def precision(self) -> Precision:
        """What the computation runs in."""
        return self.spec.precision

    def feeder(self) -> feed.Feeder:
        """A new feeder of training batches; resident rows are put on the devices here."""
        if self.feed_kind == "resident":
            rows = self.dataset.resident("train")
            return feed.Resident({n: processes.put(x, meshes.replicated(self.mesh)) for n, x in rows.items()})
        return feed.FEEDERS[self.feed_kind](*self._own_batches())

    def host_batches(self, part: tuple[int, int] | None = None) -> feed.HostBatches:
        """Training batches on the host, by position; `part`: [first, last) of their rows."""
        train = self.config.train
        return feed.HostBatches(self.dataset, "train", train.seed, train.global_batch_size, part)

    def _own_batches(self) -> tuple[feed.HostBatches, feed.Put]:
        """Of each training batch the rows that this process's devices hold, and how they get there."""
        rows = self.config.train.global_batch_size
        first, last = processes.own_rows(meshes.rows_sharding(self.mesh), rows)

        def put(batch: dict[str, Any]) -> dict[str, Any]:
            shardings = meshes.batch_shardings(self.mesh, batch)
            return {n: processes.put(x, shardings[n], rows if x.ndim else None, first) for n, x in batch.items()}

        return self.host_batches((first, last)), put

    def put(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A host batch on the devices, its rows split over them."""
        shardings = meshes.batch_shardings(self.mesh, batch)
        return {name: processes.put(x, shardings[name]) for name, x in batch.items()}

    def compile(self) -> None:
        """Compile the training step ahead of its first call, which then finds it compiled."""
        self.compiled  # noqa: B018

    @functools.cached_property
    def compiled(self) -> Any:
        """The compiled training step, for its memory; the run calls `advance`."""
        return self.lower().compile()

    def lower(self) -> Any:
        """The lowered training step, for its text or its memory."""
        return self._traced.lower()

    @functools.cached_property
    def _traced(self) -> Any:
        return self.advance.trace(*self.expected)  # type: ignore[attr-defined]

    @functools.cached_property
    def expected(self) -> tuple[State, dict[str, Any]]:
        """What a step is compiled for: abstract (state, fed)."""
        return self.abstract_state, self._abstract_fed()

    @functools.cached_property
    def model_flops(self) -> int:
        """Operations of a step's products and convolutions, without what is computed again for the memory's sake."""
        again = getattr(self.config.model, "remat", "none") != "none" or self.mesh.shape["pipe"] > 1
        return min(self.cost.step_flops, 3 * self.cost.forward_flops) if again else flops_of(self._traced.jaxpr)

    @functools.cached_property
    def cost(self) -> Cost:
        """Operations and kept bytes of a training step, counted from the traced program."""
        spec = dataclasses.replace(self.spec, module=self.plain)
        return step_cost(spec, _abstract_batch(self.dataset, self.config.train.global_batch_size))

    def _abstract_fed(self) -> Any:
        if self.feed_kind == "resident":
            sharding = meshes.replicated(self.mesh)
            shapes = self.dataset.resident_shapes("train")
            return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for n, x in shapes.items()}
        batch = self.host_batches()(0)
        shardings = meshes.batch_shardings(self.mesh, batch)
        return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in batch.items()}


def build(
    config: RunConfig,
    *,
    model: nnx.Module | Make | None = None,
    loss: Callable[..., Any] | None = None,
    source: ArraySource | None = None,
    dataset: Data | None = None,
) -> Job:
    """Everything of a run but the run. `model`, `loss`, `source` replace what the config names.

    model: an nnx.Module, or a function rngs -> nnx.Module. loss: loss(model, batch) -> scalar or (sum, count, metrics).
    dataset: one that is there already, for an evaluation; it may have no training rows.
    Raises ConfigError for what the data shows to be wrong.
    """
    processes.start()
    devices = available()
    dataset = make_dataset(config, source) if dataset is None else dataset
    notes = list(dataset.notes)
    make = maker(config, dataset.schema, model)
    module = plain = ModuleDef(make)
    rules.check(config, module.params, dataset.schema.input_shape)
    mesh = meshes.make_mesh(config.mesh, devices.devices)
    resolve.check_divisible(config, meshes.row_parts(mesh))
    specs = rules.parameter_specs(config.model.kind, module.params, mesh)
    if mesh.shape["fsdp"] > 1 or mesh.shape["pipe"] > 1:
        module = Placed(make, specs, mesh)
    objective, loss_fn, metrics = _objective(config, dataset, module, loss, notes)
    steps = resolve.steps(config, dataset)
    precision = resolve_precision(config.precision, devices)
    convolutional = resolve.convolutional(config, module)
    train = config.train
    spec = StepSpec(
        module=module,
        loss=loss_fn,
        optimizer=make_optimizer(config.optimizer),
        schedule=make_schedule(
            config.schedule, config.optimizer.peak_lr, total_steps=steps.total, steps_per_epoch=steps.per_epoch
        ),
        precision=precision,
        preprocess=dataset.schema.preprocess(),
        augment=config.augment,
        seed=train.seed,
        micro_batches=train.global_batch_size // (train.micro_batch_size or train.global_batch_size),
        unroll=convolutional and devices.platform == "cpu",
        lanes=resolve.lanes(config, module, devices, mesh.size),
        branch=devices.platform == "cpu" and mesh.size == 1,
        clip_norm=config.optimizer.clip_norm,
        ema_decay=train.ema_decay,
        log_every=steps.log_every,
    )
    sums = _check_runs(spec, dataset, train.global_batch_size)
    start = _initialiser(spec, model if isinstance(model, nnx.Module) else None, sums)
    abstract = jax.eval_shape(start)
    shardings = rules.state_shardings(abstract, module.params, specs, mesh)
    shardings = offload.placed(config.optimizer, devices, abstract, shardings)
    abstract = jax.tree.map(lambda s, own: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=own), abstract, shardings)
    whole = rules.large_and_whole(abstract["params"], mesh)
    if whole:
        notes.append(f"on every device in full, as no axis of the mesh divides them: {', '.join(whole)}")
    nbytes = sum(x.size * x.dtype.itemsize for x in dataset.resident_shapes("train").values())
    feed_kind = feed.choose(config.data.feed, nbytes, devices.memory, dataset.in_memory)
    train_step = offload.around(make_train_step(spec), shardings)
    advance = _advance(train_step, feed_kind, dataset, train, mesh)
    resolve.check_dispatch(config, feed_kind)
    jit = functools.partial(jax.jit, compiler_options=compiler_options(devices.platform, convolutional) or None)
    stepping = functools.partial(jit, donate_argnums=0, out_shardings=(shardings, meshes.replicated(mesh)))
    return Job(
        config=config,
        dataset=dataset,
        devices=devices,
        mesh=mesh,
        module=module,
        plain=plain,
        spec=spec,
        metrics=metrics,
        steps=steps,
        feed_kind=feed_kind,
        eval_batch=resolve.eval_batch(config, meshes.row_parts(mesh)),
        mode=resolve.mode(config, metrics),
        abstract_state=abstract,
        init=jax.jit(start, out_shardings=shardings, compiler_options=run_once_options(devices.platform) or None),
        advance=stepping(advance),
        advance_many=stepping(_advance_many(advance)),
        eval_step=jit(make_eval_step(spec, objective, metrics), out_shardings=meshes.replicated(mesh)),
        notes=tuple(notes),
        remake=functools.partial(build, model=model, loss=loss, dataset=dataset),
    )


def config_digest(config: RunConfig) -> str:
    """sha256 of the resolved config."""
    return hashlib.sha256(json.dumps(config.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def _advance(
    step: Callable[..., Any], feed_kind: str, dataset: Data, train: schema.Train, mesh: Any
) -> Callable[..., Any]:
    def draw(rows: dict[str, Any], position: jax.Array) -> dict[str, Any]:
        return feed.gather(dataset, rows, position, train.seed, train.global_batch_size)

    def advance(state: State, fed: dict[str, Any]) -> Any:
        if feed_kind == "resident":
            position = state["step"] + state["data_offset"]
            fed = meshes.everywhere(mesh, draw)(fed, position)
            fed = jax.lax.with_sharding_constraint(fed, meshes.batch_shardings(mesh, fed))
        return step(state, fed)

    return advance


def _advance_many(advance: Callable[..., Any]) -> Callable[..., Any]:
    def advance_many(state: State, fed: dict[str, Any], count: jax.Array) -> Any:
        metrics = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), jax.eval_shape(advance, state, fed)[1])
        return jax.lax.fori_loop(0, count, lambda _, carry: advance(carry[0], fed), (state, metrics))

    return advance_many


def _initialiser(spec: StepSpec, module: nnx.Module | None, sums: tuple[str, ...]) -> Callable[..., State]:
    given = spec.module.extract(module) if module is not None else None

    def start(weights: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> State:
        params, model_state = given or spec.module.init(spec.seed)
        return init_state(
            {**params, **weights.get("params", {})},
            {**model_state, **weights.get("model_state", {})},
            spec.optimizer,
            ema=spec.ema_decay > 0,
            loss_scale=spec.precision.initial_scale,
            sums=sums,
        )

    return start


def _objective(
    config: RunConfig, dataset: Data, module: ModuleDef, loss: Callable[..., Any] | None, notes: list[str]
) -> tuple[Objective | None, LossFn, Metrics | None]:
    task, outputs = dataset.schema.task, dataset.schema.outputs
    metrics = METRICS[task](outputs, config.evaluate.top_k)
    if loss is None and isinstance(config.objective, schema.CustomObjective):
        loss = load_target(config.objective.target, "objective")
    if loss is None:
        objective = make_objective(config.objective, class_weights(config.objective, dataset))
        return objective, built_in_loss(objective, metrics.train_sums, module.takes_mask), metrics
    fitting = metrics if task in ("classes", "tokens") and _gives_classes(module, dataset) else None
    if fitting is None:
        wanted = ["B", *map(str, dataset.schema.target_shape), str(outputs)]
        notes.append(f"model(inputs) does not give [{', '.join(wanted)}]: only the loss is evaluated")
    return None, user_loss(loss), fitting


def _gives_classes(module: ModuleDef, dataset: Data) -> bool:
    """Whether model(inputs) of a user's module gives [B, ..., C]; then accuracy and its kin can be evaluated too."""
    batch, preprocess = _abstract_batch(dataset, 2), dataset.schema.preprocess()

    def forward(params: Any, model_state: Any, batch: Any) -> Any:
        ready = {**batch, "inputs": preprocess(batch["inputs"])}
        return call_model(module.bind(params, model_state, None), ready, module.takes_mask)

    try:
        out = jax.eval_shape(forward, module.params, module.model_state, batch)
    except Exception:  # a user's module may want anything; then only its own loss is known
        return False
    return out.shape == (2, *dataset.schema.target_shape, dataset.schema.outputs)


def _abstract_batch(dataset: Data, rows: int) -> dict[str, Any]:
    batch: dict[str, Any] = dict(dataset.shapes(rows))
    batch["mask"] = jax.ShapeDtypeStruct((rows,), np.bool_)
    batch["epoch"] = jax.ShapeDtypeStruct((), np.int32)
    return batch


def _check_runs(spec: StepSpec, dataset: Data, rows: int) -> tuple[str, ...]:
    """Trace the loss once, abstractly: names of its sums; what the model raises becomes one line."""
    batch = _abstract_batch(dataset, max(rows // spec.micro_batches, 1))

    def trace(params: Any, model_state: Any, batch: Any) -> Any:
        inputs = cast_floats(spec.preprocess(batch["inputs"]), spec.precision.compute)
        model = spec.module.bind(params, model_state, jax.random.key(0))
        return spec.loss(model, {**batch, "inputs": inputs})

    try:
        _, _, sums = jax.eval_shape(trace, spec.module.params, spec.module.model_state, batch)
    except Exception as error:  # a user's model and loss may raise anything
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(
            f"{spec.module.name} and its loss fail on inputs {list(batch['inputs'].shape)}, "
            f"targets {list(batch['targets'].shape)}: {what}"
        ) from error
    return tuple(sums)
