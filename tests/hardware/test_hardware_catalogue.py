"""The catalogue of cards: what the data sheets say, what drivers and people call them, and what physics allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.config.errors import ConfigError
from jaxtrain.hardware.catalogue import GIB, KINDS, cards, find, forms, named, rate, roofline
from jaxtrain.hardware.gpu_page import page

ALL = cards()


def test_every_card_is_found_by_what_its_driver_calls_it() -> None:
    for card in ALL:
        for name in card.driver:
            stated = int(card.memory * 0.95) if card.memory else None  # with ECC, and what the driver keeps
            assert find(f"{card.vendor} {name}", stated) is card, name
            assert find(name.upper(), stated) is card, name


def test_no_two_cards_share_a_name_and_each_is_meant_by_its_own() -> None:
    assert len({card.name.casefold() for card in ALL}) == len(ALL) > 180
    assert [card.name for card in ALL if named(card.name) is not card] == []


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GeForce RTX 3090 Ti", "GeForce RTX 3090 Ti"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada Generation"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("NVIDIA RTX A2000", "RTX A2000 6GB"),
        ("NVIDIA TITAN X (Pascal)", "TITAN X (Pascal)"),
        ("NVIDIA GeForce GTX TITAN X", "GeForce GTX TITAN X"),
        ("GeForce GTX 1080 Ti", "GeForce GTX 1080 Ti"),
        ("NVIDIA GeForce RTX 4090 D", "GeForce RTX 4090 D"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "GeForce RTX 4090 Laptop GPU"),
        ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770"),
        ("Apple M1 Max", "M1 Max"),
    ],
)
def test_names_as_drivers_give_them(driver: str, name: str) -> None:
    found = find(driver)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "driver",
    [
        "NVIDIA T4G",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 2080 with Max-Q Design",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Ti",
        "4090",
        "",
    ],
)
def test_a_name_that_is_not_in_the_catalogue_is_no_other_card(driver: str) -> None:
    assert find(driver) is None
    assert forms(driver) == ()


@pytest.mark.parametrize(
    ("driver", "mebibytes", "name"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, "GeForce RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3060", 8192, "GeForce RTX 3060 8GB"),
        ("NVIDIA GeForce RTX 3060", 9216, None),  # jax's share of 12 GB is not 8 GB
        ("NVIDIA GeForce RTX 3060", None, None),
        ("NVIDIA GeForce RTX 3080", 10240, "GeForce RTX 3080 10GB"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "GeForce RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16384, "GeForce RTX 3080 Laptop GPU 16GB"),
        ("NVIDIA GeForce RTX 3090", 24268, "GeForce RTX 3090"),
        ("Tesla T4", 15109, "T4"),  # with ECC
    ],
)
def test_the_memory_chooses_between_the_forms_of_one_name(driver: str, mebibytes: int | None, name: str | None) -> None:
    found = find(driver, mebibytes * 1024**2 if mebibytes else None)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx3060-12gb", "GeForce RTX 3060 12GB"),
        ("3060 8 GB", "GeForce RTX 3060 8GB"),
        ("3060ti", "GeForce RTX 3060 Ti"),
        ("3080-10gib", "GeForce RTX 3080 10GB"),
        ("4090", "GeForce RTX 4090"),
        ("4090d", "GeForce RTX 4090 D"),
        ("4090 laptop", "GeForce RTX 4090 Laptop GPU"),
        ("rtx4090laptop", "GeForce RTX 4090 Laptop GPU"),
        ("2070 super", "GeForce RTX 2070 SUPER"),
        ("a100-sxm-80gb", "A100 SXM 80GB"),
        ("H100 SXM5", "H100 SXM"),
        ("h100pcie", "H100 PCIe"),
        ("nvidia l40", "L40"),
        ("L40S", "L40S"),
        ("t4", "T4"),
        ("rtxa6000", "RTX A6000"),
        ("6000 ada", "RTX 6000 Ada Generation"),
        ("pro 6000 max-q", "RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
        ("titan x pascal", "TITAN X (Pascal)"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA RTX A2000", "RTX A2000 6GB"),
        ("mi300x", "Instinct MI300X"),
        ("9070", "Radeon RX 9070"),
        ("9070xt", "Radeon RX 9070 XT"),
        ("m1", "M1"),
        ("m1pro", "M1 Pro"),
    ],
)
def test_a_short_name_means_the_one_card_that_it_fits(text: str, name: str) -> None:
    assert named(text).name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "3060",
            "several GPUs are called '3060'; name one: GeForce RTX 3060 8GB, GeForce RTX 3060 12GB",
        ),
        ("H100", "several GPUs are called 'H100'; name one: H100 PCIe, H100 SXM, H100 NVL"),
        ("a100-80gb", "several GPUs are called 'a100-80gb'; name one: A100 SXM 80GB, A100 PCIe 80GB"),
        ("titan x", "several GPUs are called 'titan x'; name one: GeForce GTX TITAN X, TITAN X (Pascal)"),
        (
            "3061",
            "no GPU is called '3061'; did you mean GeForce RTX 3060 12GB or GeForce RTX 3060 Ti? "
            "docs/gpus.md lists those that are known",
        ),
        ("abacus", "no GPU is called 'abacus'; docs/gpus.md lists those that are known"),
        ("", "no GPU is called ''; docs/gpus.md lists those that are known"),
    ],
)
def test_a_name_that_fits_several_or_none_is_refused_with_their_names(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named(text)
    assert str(caught.value) == message


def test_a_name_that_fits_very_many_lists_the_first() -> None:
    fits = [card for card in ALL if card.kind == "laptop" and " Ti " not in card.name]
    with pytest.raises(ConfigError, match=f"GeForce RTX 4060 Laptop GPU and {len(fits) - 8} more$"):
        named("laptop")


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "fp32", "tf32", "bf16", "fp16", "capability", "year", "watts"),
    [
        ("GeForce GTX 1080 Ti", 11, 484, 11.3, None, None, None, (6, 1), 2017, 250),
        ("P100 SXM2 16GB", 16, 732, 10.6, None, None, 21.2, (6, 0), 2016, 300),
        ("V100 PCIe 16GB", 16, 900, 14, None, None, 112, (7, 0), 2017, 250),
        ("T4", 16, 320, 8.1, None, None, 65, (7, 5), 2018, 70),
        ("GeForce RTX 2080 Ti", 11, 616, 13.4, None, None, 53.8, (7, 5), 2018, 250),
        ("A100 SXM 80GB", 80, 2039, 19.5, 156, 312, 312, (8, 0), 2020, 400),
        ("A10", 24, 600, 31.2, 62.5, 125, 125, (8, 6), 2021, 150),
        ("GeForce RTX 3090", 24, 936, 35.6, 35.6, 71, 71, (8, 6), 2020, 350),
        ("RTX A6000", 48, 768, 38.7, 77.4, 154.8, 154.8, (8, 6), 2020, 300),
        ("GeForce RTX 4090", 24, 1008, 82.6, 82.6, 165.2, 165.2, (8, 9), 2022, 450),
        ("L4", 24, 300, 30.3, 60, 121, 121, (8, 9), 2023, 72),
        ("H100 SXM", 80, 3350, 67, 494, 989, 989, (9, 0), 2022, 700),
        ("B200", 180, 7700, 75, 1100, 2250, 2250, (10, 0), 2024, 1000),
        ("GeForce RTX 5090", 32, 1792, 104.8, 104.8, 209.5, 209.5, (12, 0), 2025, 575),
        ("GeForce RTX 4090 Laptop GPU", 16, 576, None, None, None, None, (8, 9), 2023, None),
        ("M1", None, 68.25, None, None, None, None, None, 2020, None),
    ],
)
def test_figures_are_those_of_the_data_sheets(
    name: str,
    memory: int | None,
    bandwidth: float,
    fp32: float | None,
    tf32: float | None,
    bf16: float | None,
    fp16: float | None,
    capability: tuple[int, int] | None,
    year: int,
    watts: float | None,
) -> None:
    card = named(name)
    assert (card.memory, card.bandwidth) == (memory * GIB if memory else None, bandwidth * 1e9)
    tflops = [value * 1e12 if value else None for value in (fp32, tf32, bf16, fp16)]
    assert [card.fp32, card.tf32, card.bf16, card.fp16] == tflops
    assert (card.compute_capability, card.year, card.watts) == (capability, year, watts)


@pytest.mark.parametrize(
    ("name", "cores", "boost"),
    [
        ("GeForce GTX 1060 6GB", 1280, 1708),
        ("GeForce GTX 1080", 2560, 1733),
        ("TITAN Xp", 3840, 1582),
        ("GeForce RTX 2060 12GB", 2176, 1650),
        ("GeForce RTX 2080 SUPER", 3072, 1815),
        ("GeForce RTX 3060 12GB", 3584, 1777),
        ("GeForce RTX 3070 Ti", 6144, 1770),
        ("GeForce RTX 3080 12GB", 8960, 1710),
        ("GeForce RTX 3080 Ti", 10240, 1665),
        ("GeForce RTX 4060", 3072, 2460),
        ("GeForce RTX 4070 SUPER", 7168, 2475),
        ("GeForce RTX 4070 Ti SUPER", 8448, 2610),
        ("GeForce RTX 4090 D", 14592, 2520),
        ("GeForce RTX 5060 Ti 8GB", 4608, 2572),
        ("GeForce RTX 5090", 21760, 2407),
    ],
)
def test_fp32_is_two_operations_a_clock_of_every_core(name: str, cores: int, boost: int) -> None:
    """Cores and boost clocks in MHz of NVIDIA's product pages."""
    assert named(name).fp32 == pytest.approx(2 * cores * boost * 1e6, abs=0.06e12)


def test_rates_keep_the_order_that_the_chips_have() -> None:
    for card in ALL:
        known = [value for value in (card.fp32, card.tf32, card.bf16) if value]
        assert known == sorted(known), card.name
        assert card.bf16 is None or card.bf16 == card.fp16, card.name
        if card.vendor == "NVIDIA" and card.bf16 and card.tf32:
            assert card.compute_capability is not None
            assert card.compute_capability >= (8, 0)
            assert 1.94 < card.bf16 / card.tf32 < 2.06, card.name


def test_a_geforce_with_fp32_sums_has_half_of_what_a_workstation_card_of_its_chip_has() -> None:
    checked = 0
    for card in ALL:
        half = card.bf16 or card.fp16
        if card.vendor != "NVIDIA" or not half or not card.fp32 or card.kind == "data centre":
            continue
        capability = card.compute_capability
        assert capability is not None
        times = {(7, 5): 4, (8, 6): 2, (8, 9): 2, (12, 0): 2}.get(capability)
        if times is None:
            continue
        if card.kind == "workstation" or card.name == "TITAN RTX":
            times *= 2
        assert half / card.fp32 == pytest.approx(times, rel=0.02), card.name
        checked += 1
    assert checked > 60


YEARS = {
    (3, 7): (2014, 2014),
    (5, 0): (2014, 2014),
    (5, 2): (2014, 2015),
    (6, 0): (2016, 2016),
    (6, 1): (2016, 2017),
    (7, 0): (2017, 2019),
    (7, 5): (2018, 2021),
    (8, 0): (2020, 2021),
    (8, 6): (2020, 2024),
    (8, 9): (2022, 2024),
    (9, 0): (2022, 2024),
    (10, 0): (2024, 2024),
    (10, 3): (2025, 2025),
    (12, 0): (2025, 2025),
    (12, 1): (2025, 2025),
}
STACKED = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (10, 3)}
"""Capabilities of the chips with stacked memory (HBM)."""


def test_capability_year_memory_and_power_belong_together() -> None:
    for card in ALL:
        assert card.kind in KINDS
        assert (card.compute_capability is not None) == (card.vendor == "NVIDIA")
        if card.compute_capability:
            first, last = YEARS[card.compute_capability]
            assert first <= card.year <= last, card.name
        assert card.watts is None or 40 <= card.watts <= 1400, card.name
        assert (card.memory is None) == (card.kind == "integrated" and card.vendor != "NVIDIA"), card.name
        if card.bandwidth is None:
            assert card.kind == "integrated"
        elif card.compute_capability in STACKED or (card.vendor != "NVIDIA" and card.kind == "data centre"):
            assert 500e9 < card.bandwidth <= 8000e9, card.name
        else:
            assert 60e9 < card.bandwidth < 1800e9, card.name


def test_every_figure_has_a_source_with_an_address() -> None:
    for card in ALL:
        assert card.source
        assert card.address.startswith("https://")
        assert " " not in card.address


@pytest.mark.parametrize(
    ("name", "can"),
    [
        ("K80", "CPU: compute capability below 5.2"),
        ("GeForce GTX 750 Ti", "CPU: compute capability below 5.2"),
        ("GeForce GTX 980", "jax[cuda12] only: compute capability below 7.5"),
        ("V100 SXM2 16GB", "jax[cuda12] only: compute capability below 7.5"),
        ("T4", "jax[cuda12] or jax[cuda13]"),
        ("GeForce RTX 5090", "jax[cuda12] or jax[cuda13]"),
        ("Instinct MI300X", "jax[rocm7-local], Linux only"),
        ("Radeon 780M", "CPU; ROCm only where AMD's list names it"),
        ("Arc B580", "CPU; jax-oneapi-plugin is experimental and needs jax 0.11"),
        ("M4 Max", "CPU; jax-metal ended in 2024, with jax 0.5"),
    ],
)
def test_what_jax_can_do_on_a_card(name: str, can: str) -> None:
    assert named(name).jax == can


def test_a_roofline_is_the_longer_of_computing_and_moving() -> None:
    card = named("a100-sxm4-40gb")
    assert roofline(card, 312e12, 1.0, "bf16") == 1.0
    assert roofline(card, 312e12, 2 * 1555e9, "bf16") == 2.0
    assert roofline(card, 312e12, 1.0, "fp16") == 1.0
    assert roofline(card, 312e12, 1.0, "fp32") == 2.0  # tf32: jax's default from Ampere on
    assert roofline(named("v100-sxm2-16gb"), 15.7e12, 1.0, "fp32") == 1.0
    assert rate(named("v100-sxm2-16gb"), "bf16") is None


@pytest.mark.parametrize(
    ("name", "precision", "message"),
    [
        ("T4", "bf16", "T4 has no known rate in bf16: use --precision fp32 or fp16"),
        ("GeForce GTX 1080 Ti", "fp16", "GeForce GTX 1080 Ti has no known rate in fp16: use --precision fp32"),
        (
            "GeForce RTX 4090 Laptop GPU",
            "bf16",
            "GeForce RTX 4090 Laptop GPU has no known rate in bf16: its time cannot be told, only its memory",
        ),
    ],
)
def test_a_roofline_without_a_rate_is_refused(name: str, precision: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        roofline(named(name), 1e12, 1e9, precision)
    assert str(caught.value) == message


def test_the_page_of_gpus_is_the_catalogue() -> None:
    """python -m jaxtrain.hardware.gpu_page > docs/gpus.md writes it anew."""
    written = Path(__file__).parents[2] / "docs" / "gpus.md"
    assert written.read_text(encoding="utf-8") == page()
    row = "| NVIDIA GeForce RTX 3090 | 24 | 936 | 35.6 | 71 | 8.6 | 2020 | 350 | jax[cuda12] or jax[cuda13] | 12 |"
    assert row in page().splitlines()
