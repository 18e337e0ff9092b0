"""The arm `HF Trainer`: transformers' `Trainer.train`, bare."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import work
from torch_nets import Batches, Learner, optimizer_of, prepare
from transformers import Trainer, TrainerCallback, TrainingArguments


class Clock(TrainerCallback):
    """Reads the time where the timed epochs begin and end."""

    def __init__(self, warm: int) -> None:
        self.left, self.begun, self.ended = warm, 0.0, 0.0

    def on_epoch_begin(self, *unused: Any, **more: Any) -> None:
        if self.left == 0:
            self.begun = time.perf_counter()
        self.left -= 1

    def on_epoch_end(self, *unused: Any, **more: Any) -> None:
        self.ended = time.perf_counter()


class Own(Trainer):
    """Takes our batches as they are."""

    def __init__(self, batches: Batches, **keys: Any) -> None:
        super().__init__(train_dataset=batches, **keys)
        self._batches = batches

    def get_train_dataloader(self) -> Batches:
        return self._batches


def train(own: work.Workload, learner: Learner, batches: Batches, place: str) -> float:
    """Seconds of the timed epochs."""
    arguments = TrainingArguments(
        output_dir=place,
        num_train_epochs=own.epochs,
        per_device_train_batch_size=own.batch,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    clock = Clock(own.warm)
    optimizers = (optimizer_of(learner), None)
    trainer = Own(batches, model=learner, args=arguments, optimizers=optimizers, callbacks=[clock])
    trainer.train()
    return clock.ended - clock.begun


def main() -> None:
    own, learner, batches = prepare()
    with tempfile.TemporaryDirectory() as place:
        seconds = train(own, learner, batches, place)
    work.report_losses(own, seconds, learner.losses)


if __name__ == "__main__":
    main()
