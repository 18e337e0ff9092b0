"""What a run is: frozen, typed, complete. Every field has a default, a check and one line of description.

`kind` chooses a variant (discriminated unions). Nothing here imports jax: parsing a config starts no backend.
The names of fields are a contract (DESIGN.md, 13).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from jaxtrain.config.data_kinds import Arrays as Arrays
from jaxtrain.config.data_kinds import Data as Data
from jaxtrain.config.data_kinds import Digits as Digits
from jaxtrain.config.data_kinds import Images as Images
from jaxtrain.config.data_kinds import Mnist as Mnist
from jaxtrain.config.data_kinds import Pystdlib as Pystdlib
from jaxtrain.config.data_kinds import Text as Text
from jaxtrain.config.durations import Period, Seconds, StepDuration
from jaxtrain.config.fields import (
    AutoOrSize,
    Count,
    Fraction,
    ListOfOne,
    MomentDtype,
    NoBool,
    NonNegative,
    PathText,
    Positive,
    Seed,
    Size,
)
from jaxtrain.config.fields import Section as Section
from jaxtrain.config.fields import described as _field
from jaxtrain.config.model_kinds import Cnn as Cnn
from jaxtrain.config.model_kinds import CustomModel as CustomModel
from jaxtrain.config.model_kinds import Gpt as Gpt
from jaxtrain.config.model_kinds import Mlp as Mlp
from jaxtrain.config.model_kinds import Model as Model
from jaxtrain.config.model_kinds import Resnet as Resnet
from jaxtrain.config.model_kinds import Tcn as Tcn


class Augment(Section):
    shift: Count = _field(0, "images move by up to this many pixels each way, zeros come in")
    flip: bool = _field(False, "images are mirrored left to right with probability 1/2")


# ---------------------------------------------------------------- objective


class CrossEntropy(Section):
    kind: Literal["cross_entropy"] = "cross_entropy"
    label_smoothing: Fraction = _field(0.0, "share of the target spread over all classes")
    class_weights: tuple[Positive, ...] | Literal["none", "balanced"] = _field(
        "none", "a weight for each class, or `balanced`: inverse to its share of the training rows"
    )
    focal_gamma: NonNegative = _field(0.0, "focal loss: (1-p)^gamma times the cross-entropy (Lin et al. 2017)")


class Binary(Section):
    kind: Literal["binary"] = "binary"
    label_smoothing: Fraction = _field(0.0, "targets move this far towards 1/2")
    positive_weight: Positive = _field(1.0, "weight of positive targets")


class Mse(Section):
    kind: Literal["mse"] = "mse"


class Mae(Section):
    kind: Literal["mae"] = "mae"


class Huber(Section):
    kind: Literal["huber"] = "huber"
    delta: Positive = _field(1.0, "where the square turns into a line (Huber 1964)")


class CustomObjective(Section):
    kind: Literal["custom"] = "custom"
    target: str = _field(..., "your loss(model, batch) -> scalar or (sum, count, metrics): file.py:function")


Objective = Annotated[CrossEntropy | Binary | Mse | Mae | Huber | CustomObjective, Field(discriminator="kind")]

# ---------------------------------------------------------------- optimizer and schedule


class _Optimizer(Section):
    peak_lr: Positive = _field(1e-3, "the highest learning rate of the schedule")
    clip_norm: NonNegative = _field(1.0, "gradients are scaled down to this global norm; 0 = never")
    offload: Literal["none", "host"] = _field("none", "host: moments live in the host's memory, not in the GPU's")


class _Decay(_Optimizer):
    weight_decay: NonNegative = _field(0.0, "decoupled; not on biases, norms and embeddings")


class Sgd(_Optimizer):
    kind: Literal["sgd"] = "sgd"
    peak_lr: Positive = _field(0.1, "the highest learning rate of the schedule")
    weight_decay: NonNegative = _field(0.0, "L2 term added to the gradient; not on biases, norms, embeddings")


class Momentum(Sgd):
    kind: Literal["momentum"] = "momentum"  # type: ignore[assignment]
    momentum: Fraction = _field(0.9, "decay of the running sum of gradients")
    nesterov: bool = _field(False, "look ahead by one step (Nesterov)")
    moment_dtype: MomentDtype = _field("float32", "type in which the running sum is kept; int8: in blocks of 8 bits")


class Adam(_Optimizer):
    kind: Literal["adam"] = "adam"
    b1: Fraction = _field(0.9, "decay of the first moment")
    b2: Fraction = _field(0.999, "decay of the second moment")
    eps: Positive = _field(1e-8, "added to the root of the second moment")
    moment_dtype: MomentDtype = _field("float32", "type of the moments; bfloat16: of the first only; int8: in blocks")


class Adamw(_Decay):
    kind: Literal["adamw"] = "adamw"
    weight_decay: NonNegative = _field(0.01, "decoupled; not on biases, norms and embeddings")
    b1: Fraction = _field(0.9, "decay of the first moment")
    b2: Fraction = _field(0.999, "decay of the second moment")
    eps: Positive = _field(1e-8, "added to the root of the second moment")
    moment_dtype: MomentDtype = _field("float32", "type of the moments; bfloat16: of the first only; int8: in blocks")


class Lion(_Decay):
    kind: Literal["lion"] = "lion"
    peak_lr: Positive = _field(1e-4, "the highest learning rate of the schedule (a tenth of adamw's)")
    b1: Fraction = _field(0.9, "mixing of gradient and moment in the update")
    b2: Fraction = _field(0.99, "decay of the moment")
    moment_dtype: MomentDtype = _field("float32", "type in which the moment is kept; int8: in blocks of 8 bits")


class Muon(_Decay):
    kind: Literal["muon"] = "muon"
    peak_lr: Positive = _field(0.02, "the highest learning rate of the schedule, for matrices and kernels")
    momentum: Fraction = _field(0.95, "decay of the running sum of gradients")
    ns_steps: Size = _field(5, "Newton-Schulz iterations that orthogonalise the update")
    adam_lr_factor: Positive = _field(0.1, "all that is not a matrix is trained by Nesterov Adam at peak_lr times this")
    b1: Fraction = _field(0.9, "Adam's first decay, for all that is not a matrix")
    b2: Fraction = _field(0.999, "Adam's second decay, for all that is not a matrix")
    moment_dtype: MomentDtype = _field("float32", "type in which the running sums are kept; int8: in blocks of 8 bits")


class Adafactor(_Decay):
    kind: Literal["adafactor"] = "adafactor"
    decay_rate: Fraction = _field(0.8, "power of the decay of the second moment")
    min_dim_size_to_factor: Size = _field(128, "second moments of smaller matrices are not factored")
    clipping_threshold: Positive = _field(1.0, "bound on the root mean square of each update")


class Lamb(_Decay):
    kind: Literal["lamb"] = "lamb"
    weight_decay: NonNegative = _field(0.01, "decoupled; not on biases, norms and embeddings")
    b1: Fraction = _field(0.9, "decay of the first moment")
    b2: Fraction = _field(0.999, "decay of the second moment")
    eps: Positive = _field(1e-6, "added to the root of the second moment")


Optimizer = Annotated[Sgd | Momentum | Adam | Adamw | Lion | Muon | Adafactor | Lamb, Field(discriminator="kind")]


class _Schedule(Section):
    warmup: StepDuration = _field(0, "updates in which the rate climbs from zero to the peak")


class Constant(_Schedule):
    kind: Literal["constant"] = "constant"


class Linear(_Schedule):
    kind: Literal["linear"] = "linear"
    end_factor: NonNegative = _field(0.0, "last rate as a share of the peak")


class Cosine(_Schedule):
    kind: Literal["cosine"] = "cosine"
    end_factor: NonNegative = _field(0.0, "last rate as a share of the peak")


class OneCycle(Section):
    kind: Literal["one_cycle"] = "one_cycle"
    warmup: StepDuration = _field("30%", "updates in which the rate climbs to the peak")
    start_factor: Positive = _field(0.04, "first rate as a share of the peak")
    end_factor: NonNegative = _field(4e-6, "last rate as a share of the peak")


class Wsd(_Schedule):
    kind: Literal["wsd"] = "wsd"
    decay: StepDuration = _field("20%", "updates of the final linear decay (warm-up, stable, decay)")
    end_factor: NonNegative = _field(0.0, "last rate as a share of the peak")


class Exponential(_Schedule):
    kind: Literal["exponential"] = "exponential"
    decay_factor: Positive = _field(0.9, "the rate is multiplied by this ...")
    decay_every: StepDuration = _field("1ep", "... once in so many updates, smoothly")


class Piecewise(_Schedule):
    kind: Literal["piecewise"] = "piecewise"
    boundaries: Annotated[tuple[StepDuration, ...], ListOfOne] = _field(("50%", "75%"), "where the rate changes")
    factors: Annotated[tuple[Positive, ...], ListOfOne] = _field((0.1, 0.1), "by what it is multiplied there")


class InverseSqrt(_Schedule):
    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    timescale: StepDuration = _field("10%", "updates after which the rate has fallen to 1/sqrt(2) of the peak")


Schedule = Annotated[
    Constant | Linear | Cosine | OneCycle | Wsd | Exponential | Piecewise | InverseSqrt,
    Field(discriminator="kind"),
]

# ---------------------------------------------------------------- the run


class Train(Section):
    duration: StepDuration = _field("20ep", "length of the run")
    seed: Seed = _field(0, "seed of initialisation, order, dropout and augmentation")
    global_batch_size: Size = _field(64, "rows of one update, over all devices and micro-batches")
    micro_batch_size: Size | None = _field(
        None, "rows of one forward pass over all devices; several are accumulated; none = the whole batch"
    )
    steps_per_dispatch: AutoOrSize = _field(
        "auto", "steps that one dispatch may run over rows on the device; auto = measured, 1 where it changes a bit"
    )
    lanes: Size | None = _field(
        None, "parts of a forward pass that a CPU computes side by side; none = by the kind of model (gpt 2, others 1)"
    )
    ema_decay: Fraction = _field(0.0, "decay of the averaged weights, which are then evaluated; 0 = none")
    init_from: PathText | None = _field(
        None, "a run folder (its best step) or RUN/checkpoints/N: begin with its weights, as far as they fit"
    )
    fit: Literal["check", "auto", "never"] = _field(
        "check", "where memory is too small: check = refuse, and say what fits; auto = take that; never = try"
    )
    time_budget: Seconds = _field(None, 'stop and save after so much wall time ("2h"); the best step is then tested')
    overfit_batches: Count = _field(0, "train and evaluate on so many batches only, to see the loss fall; 0 = off")


class Mesh(Section):
    data: Annotated[int, NoBool] = _field(-1, "devices that split the rows of a batch; -1 = all the others leave")
    fsdp: Size = _field(1, "devices that split the rows, and hold a part of every large parameter and its moments")
    tensor: Size = _field(1, "devices that split each product, by heads and hidden features; gpt and mlp")
    context: Size = _field(1, "devices that split the tokens of a row; gpt")
    pipe: Size = _field(1, "devices that split the blocks, a stage each; gpt with model.scan_layers=true")


class Checkpoint(Section):
    every: Period = _field("5m", "distance between saves; an improving evaluation and the end always save")
    keep_last: Size = _field(2, "newest steps that are kept")
    keep_best: Count = _field(1, "best steps that are kept")
    keep_every: StepDuration = _field(0, "distance between steps that are saved and kept for ever; 0 = none")
    mirror: PathText | None = _field(None, "sealed steps and small files are copied to PATH/<name>/<id>, a run folder")


class Evaluate(Section):
    every: StepDuration = _field("1ep", "distance between evaluations on the validation split")
    metric: str = _field("loss", "what chooses the best step, early stopping too")
    mode: Literal["auto", "min", "max"] = _field("auto", "which way is better; auto knows the built-in metrics")
    batch_size: Size | None = _field(None, "rows of one evaluation batch; none = train.global_batch_size")
    top_k: Size = _field(5, "k of the top-k accuracy")


class EarlyStopping(Section):
    patience: Count = _field(0, "stop after so many evaluations without improvement; 0 = never")
    min_delta: NonNegative = _field(0.0, "less than this is no improvement")


class Guard(Section):
    max_skips: Size = _field(20, "non-finite updates are skipped; after so many in a row the run goes back")
    max_rollbacks: Count = _field(
        3, "so often in a row it goes back to a sealed step, and on past the batches; then it ends with exit 78"
    )
    loss_spike: NonNegative = _field(
        0.0, "goes back too when a row's loss is so many robust deviations too high; 0 = never: most spikes pass"
    )
    stall_limit: Seconds = _field(
        "30m", "a run that shows no step, evaluation batch or save for so long ends with exit 70; none = never"
    )


class Log(Section):
    every: Size = _field(50, "steps between rows of metrics")
    tensorboard: bool = _field(True, "write TensorBoard events into the run folder")
    wrong_samples: Count = _field(25, "wrong predictions kept for the report")


class RunConfig(Section):
    """The whole of a run. Same config + same journal = same run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$")] = _field(
        "run", "runs/<name>/ holds the runs"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = _field(
        "auto", "type of the computation (parameters stay fp32); auto: fp32 on CPU, bf16 or fp16 by the GPU"
    )
    model: Model = _field(Mlp(), "what is trained")
    data: Data = _field(Digits(), "what it is trained on")
    augment: Augment = _field(Augment(), "random changes of training images, inside jit")
    objective: Objective = _field(CrossEntropy(), "what is minimised")
    optimizer: Optimizer = _field(Adamw(), "how it is minimised")
    schedule: Schedule = _field(Cosine(), "learning rate over the updates")
    train: Train = _field(Train(), "length, batch, seed")
    evaluate: Evaluate = _field(Evaluate(), "what happens on the validation split")
    early_stopping: EarlyStopping = _field(EarlyStopping(), "when to end before the end")
    checkpoint: Checkpoint = _field(Checkpoint(), "what is saved and kept")
    guard: Guard = _field(Guard(), "what happens on NaN and infinity")
    mesh: Mesh = _field(Mesh(), "how devices share the work")
    log: Log = _field(Log(), "what is written down")
