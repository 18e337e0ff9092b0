"""Plans for cards that are not here: the right precision and limit, a band with three verdicts, a ranking."""

from __future__ import annotations

import dataclasses

import pytest
from plan_helpers import GPT, job_of

from jaxtrain.build import Job
from jaxtrain.hardware.catalogue import named, rate
from jaxtrain.hardware.memory import Limit
from jaxtrain.plan import cards, memory, planned
from jaxtrain.plan.units import GIB

KEYS = {**GPT, "model.layers": 2, "train.global_batch_size": 32}


@pytest.fixture(scope="module")
def gpt() -> Job:
    return job_of(**KEYS, precision="bf16")


@pytest.mark.parametrize(
    ("card", "precision"),
    [("a100 sxm 80gb", "bf16"), ("3060-12gb", "bf16"), ("t4", "fp16"), ("v100-sxm2-16gb", "fp16"), ("1080 ti", "fp32")],
)
def test_a_card_computes_in_what_auto_would_choose_there(card: str, precision: str) -> None:
    assert cards.precision(named(card)) == precision


def test_a_plan_for_a_card_is_counted_against_three_quarters_of_its_memory(gpt: Job) -> None:
    card = named("3060-12gb")
    found = cards.plan_for(gpt, card)
    own = memory.counted(gpt)
    assert (found.how, found.memory, found.need, found.least) == ("counted", own, own.total, own.least)
    assert found.room == Limit(9 * GIB, f"what jax may use on a {card.name}", shared=False)
    assert found.verdict == "fits"
    assert found.roof is not None
    assert found.roof.flops == rate(card, "bf16")
    assert found.seconds is not None
    assert found.seconds >= gpt.model_flops / found.roof.flops
    text = "\n".join(planned.lines(found, gpt))
    assert f"; 9.0 GiB are what jax may use on a {card.name}\n" in text
    assert "second state" not in text  # jax copies to the host there


def test_between_the_ends_of_the_band_a_run_may_fit_and_below_it_does_not(gpt: Job) -> None:
    card, own = named("3060-12gb"), memory.counted(gpt)
    for room, verdict in (
        (own.total, "fits"),
        (own.total - 1, "borderline"),
        (own.least, "borderline"),
        (own.least - 1, "no"),
    ):
        found = cards.plan_for(gpt, card, Limit(room, "asked for on a device", shared=False), search=False)
        assert found.verdict == verdict
    found = cards.plan_for(gpt, card, Limit(own.least - 1, "asked for on a device", shared=False))
    assert found.choices == ()  # the work space that is always counted is larger than all of this network
    large = cards.plan_for(gpt, card, Limit(own.total - 20 * 2**20, "asked for on a device", shared=False))
    assert large.choices[0].keys.keys() == {"train.micro_batch_size"}
    assert large.choices[0].need <= own.total - 20 * 2**20


def test_all_cards_are_ranked_by_what_fits_and_how_fast(gpt: Job) -> None:
    jobs: list[str] = []

    def job_in(precision: str) -> Job:
        jobs.append(precision)
        return gpt.remake(gpt.config.model_copy(update={"precision": precision}))

    found = cards.ranked(job_in)
    assert sorted(jobs) == ["bf16", "fp16", "fp32"]
    assert len(found) > 40
    assert {r.card.vendor for r in found} == {"NVIDIA"}
    seconds = [r.seconds for r in found if r.plan.verdict == "fits" and r.seconds]
    assert seconds == sorted(seconds)
    assert [r.plan.verdict for r in found] == sorted(
        (r.plan.verdict for r in found), key=["fits", "borderline", "no"].index
    )
    own = named("3060-12gb")
    lines = cards.table(found, own)
    (mine,) = [line for line in lines if line.startswith(f"{own.name} ")]
    assert mine.endswith(" 1.0x")
    assert all(line.endswith(("x", "?")) for line in lines[1:])
    assert not lines[0].endswith("x")
    assert "speed" not in cards.table(found)[0]


def test_a_card_without_a_known_rate_has_a_plan_without_a_time(gpt: Job) -> None:
    card = dataclasses.replace(named("3060-12gb"), bf16=None)
    found = cards.plan_for(gpt, card)
    assert (found.seconds, found.roof) == (None, None)
    assert "no time: what these devices can do at most is not known" in "\n".join(planned.lines(found, gpt))
