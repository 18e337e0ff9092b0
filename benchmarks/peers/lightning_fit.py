"""The arm `Lightning`: `Trainer.fit`, bare."""

from __future__ import annotations

import time
from typing import Any

import lightning
import work
from torch_nets import Batches, Learner, optimizer_of, prepare


class Module(lightning.LightningModule):
    """A step is the loss of a batch."""

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self.learner = learner

    def training_step(self, batch: dict[str, Any], index: int) -> Any:
        return self.learner(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.learner)


class Clock(lightning.Callback):
    """Reads the time where the timed epochs begin and end."""

    def __init__(self, warm: int) -> None:
        self.warm, self.begun, self.ended = warm, 0.0, 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.warm:
            self.begun = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.ended = time.perf_counter()


def fit(own: work.Workload, learner: Learner, batches: Batches) -> float:
    """Seconds of the timed epochs."""
    clock = Clock(own.warm)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=own.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[clock],
    )
    trainer.fit(Module(learner), batches)
    return clock.ended - clock.begun


def main() -> None:
    own, learner, batches = prepare()
    work.report_losses(own, fit(own, learner, batches), learner.losses)


if __name__ == "__main__":
    main()
