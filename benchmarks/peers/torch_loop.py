"""The arm `PyTorch`: an eager loop by hand, fused AdamW, all cores, channels_last for convolutions of images."""

from __future__ import annotations

import time

import work
from torch_nets import optimizer_of, prepare


def main() -> None:
    own, learner, batches = prepare()
    optimizer = optimizer_of(learner)
    begun = 0.0
    for epoch in range(own.epochs):
        if epoch == own.warm:
            begun = time.perf_counter()
        for batch in batches:
            loss = learner(**batch)["loss"]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    work.report_losses(own, time.perf_counter() - begun, learner.losses)


if __name__ == "__main__":
    main()
