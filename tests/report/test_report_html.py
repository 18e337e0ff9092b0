"""report.html: every figure is one of the files, nothing leaves the page, and any run folder gives a page."""

from __future__ import annotations

import copy
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from report_helpers import CONFUSION, ENV, RESOLVED, RESULT, STATUS, Page, make_run, metric_rows, report_of

from jaxtrain.hooks.folder import RunFolder
from jaxtrain.report.record import figure, seconds, wilson


def changed(path: str, value: Any) -> dict[str, Any]:
    """RESULT with one part replaced: changed("test.accuracy", 0.5)."""
    result = copy.deepcopy(RESULT)
    *way, last = path.split(".")
    part = result
    for key in way:
        part = part[key]
    part[last] = value
    return result


def without(*names: str) -> dict[str, Any]:
    return {k: copy.deepcopy(v) for k, v in RESULT.items() if k not in names}


# ------------------------------------------------------------ figures


def test_the_headline_tells_figure_rows_step_and_how_it_was_chosen(tmp_path: Path) -> None:
    page = Page.of(report_of(make_run(tmp_path)))
    assert page.h1 == "test accuracy 0.8919 on 37 rows, read once, at step 60, the best of 5 by eval/loss."
    assert "4 of 37 wrong; 95 % interval of the accuracy 0.753 to 0.957 (Wilson)." in page.text
    assert "Always saying the most frequent class would reach 0.3784." in page.text  # 14 of 37


def test_figures_on_the_page_are_exactly_those_of_the_result(tmp_path: Path) -> None:
    values = Page.of(report_of(make_run(tmp_path))).values
    details = RESULT["details"]["per_class"]
    for value in [*RESULT["test"].values(), *RESULT["best"]["evaluation"].values(), *details["f1"], *details["recall"]]:
        assert repr(value) in values
    assert repr(0.5123456789) not in values


def test_another_figure_in_the_result_shows_up_on_the_page(tmp_path: Path) -> None:
    page = Page.of(report_of(make_run(tmp_path, result=changed("test.accuracy", 0.5123456789))))
    assert "test accuracy 0.5123 on" in page.h1
    assert repr(0.5123456789) in page.values
    assert repr(RESULT["test"]["accuracy"]) not in page.values


def test_key_facts_come_from_the_files(tmp_path: Path) -> None:
    text = Page.of(report_of(make_run(tmp_path))).text
    for fact in ("cnn", "53,098", "1,078 train, 362 validation, 37 test", "4 min 10 s, goodput 60%", "1 x cpu", "fp32"):
        assert fact in text
    assert "duration 100 steps, 5 epochs (40ep asked for)" in text
    assert "seed 7" in text


def test_classes_are_sorted_worst_first_with_support_and_unknown_auroc(tmp_path: Path) -> None:
    text = Page.of(report_of(make_run(tmp_path))).text
    table = text[text.index("Classes, the worst first") : text.index("Journal")]
    assert [table.index(name) for name in ("cat", "owl", "dog")] == sorted(
        table.index(n) for n in ("cat", "owl", "dog")
    )
    assert "owl 1.0000 0.7857 0.8800 14 –" in table


def test_confusion_shows_counts_and_the_pairs_confused_most(tmp_path: Path) -> None:
    text = Page.of(report_of(make_run(tmp_path))).text
    assert "owl → cat: 3 of 14" in text
    pairs = text[text.index("Confused most") :]
    assert pairs.index("owl → cat 3 21.4%") < pairs.index("cat → dog 1 9.1%")


# ------------------------------------------------------------ safety


def test_nothing_is_loaded_and_the_policy_forbids_it(tmp_path: Path) -> None:
    text = report_of(with_picture(make_run(tmp_path, result=PICTURED)))
    page = Page.of(text)
    assert len(page.loads) == 1
    assert page.loads[0].startswith("data:image/png;base64,")
    assert "default-src 'none'" in text
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert not re.search(r"url\(|@import", text)
    # Control: the parser would see a request.
    assert Page.of(text.replace("data:image/png", "https://x/y")).loads[0].startswith("https://")


def test_every_text_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&"
    result = changed("class_names", [evil, "dog", "owl"])
    result["details"]["per_class"]["f1"] = [evil, 0.5, 0.5]
    result["wrong"] = [
        {"id": evil, "true": evil, "predicted": evil, "probability": 0.5, "image": f"samples/{evil}.png"}
    ]
    result["test"][evil], result["best"]["metric"], result["split"] = 0.5, evil, evil
    folder = make_run(
        tmp_path,
        result=result,
        status={**STATUS, "state": evil, "reason": evil, "updated": evil},
        rows=[*metric_rows(), {"step": 100, f"eval/{evil}": 0.5, f"train/{evil}": 0.5}],
        journal=[{"event": evil, "step": 50, "time": evil, evil: {evil: [evil, evil]}}],
        env={**ENV, evil: evil, "devices": evil, "command": [evil]},
        resolved=RESOLVED.format(name="'<script>alert(2)</script>'") + "# <script>",
    )
    text = report_of(folder)
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "&lt;script&gt;alert(2)" in text


def test_a_picture_outside_samples_is_never_read(tmp_path: Path) -> None:
    result = changed("wrong", [{**ONE, "image": "../../secret.png"}])
    folder = make_run(tmp_path, result=result)
    for place in (folder.path.parent, folder.path):
        (place / "secret.png").write_bytes(b"secret")
    page = Page.of(report_of(folder))
    assert page.loads == []
    assert "no picture" in page.text


# ------------------------------------------------------------ wrong samples

ONE = {
    "id": 1234,
    "true": "owl",
    "predicted": "cat",
    "probability": 0.987654321,
    "image": "samples/wrong_00_id1234.png",
}
PICTURED = changed("wrong", [ONE, {**ONE, "id": 5, "image": None}])


def with_picture(folder: RunFolder, pixels: np.ndarray | None = None) -> RunFolder:
    folder.samples.mkdir()
    pixels = np.eye(32, dtype=np.uint8) * 255 if pixels is None else pixels
    Image.fromarray(pixels).save(folder.samples / "wrong_00_id1234.png")
    return folder


def test_wrong_samples_show_picture_truth_prediction_and_probability(tmp_path: Path) -> None:
    page = Page.of(report_of(with_picture(make_run(tmp_path, result=PICTURED))))
    assert "The 2 of 4 wrong predictions" in page.text
    assert "owl → cat ( 0.9877 ) row 1234" in page.text
    assert "row is no image" in page.text
    assert [load[:22] for load in page.loads] == ["data:image/png;base64,"]


def test_rows_that_are_no_images_are_a_list_without_empty_frames(tmp_path: Path) -> None:
    page = Page.of(report_of(make_run(tmp_path, result=changed("wrong", [{**ONE, "image": None}]))))
    assert "owl → cat ( 0.9877 ) row 1234" in page.text
    assert "row is no image" not in page.text


def test_large_pictures_become_small_ones(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (500, 500, 3), np.uint8)
    folder = with_picture(make_run(tmp_path, result=PICTURED), noise)
    assert (folder.samples / "wrong_00_id1234.png").stat().st_size > 700_000
    text = report_of(folder)
    assert "data:image/jpeg;base64," in text
    assert len(text) < 150_000


# ------------------------------------------------------------ any run


@pytest.mark.parametrize(
    ("parts", "h1"),
    [
        ({"result": without("test", "wrong", "details")}, "No test figure: this run has no test rows. Best eval/loss"),
        (
            {
                "result": {
                    **without("test", "details", "split"),
                    "best": {"step": 100, "metric": "loss", "evaluation": None},
                }
            },
            "No test figure: this run has no evaluation and no test rows; the last checkpoint is of step 100.",
        ),
        (
            {"result": None, "status": {"state": "running", "step": 97, "reason": ""}},
            "No result yet: the run goes on, step 100; best eval/loss so far 0.2000 at step 60.",
        ),
        (
            {"result": None, "status": {"state": "failed", "reason": "disk full", "step": 100}, "rows": []},
            "No result: state failed (disk full), at step 100.",
        ),
        (
            dict.fromkeys(("result", "status", "rows", "env", "journal", "resolved")),
            "No result yet: no state is recorded, step 0.",
        ),
    ],
)
def test_a_run_without_test_figure_says_so_and_why(tmp_path: Path, parts: dict[str, Any], h1: str) -> None:
    assert Page.of(report_of(make_run(tmp_path, **parts))).h1.startswith(h1)


def test_a_run_without_validation_claims_no_choice(tmp_path: Path) -> None:
    result = {**copy.deepcopy(RESULT), "best": {"step": 100, "metric": "loss", "evaluation": None}}
    page = Page.of(report_of(make_run(tmp_path, result=result)))
    assert page.h1.endswith("at step 100, the last one saved (nothing was there to choose it by).")
    assert "best of" not in page.h1


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    stopped = make_run(tmp_path, result=None, status={"state": "preempted", "reason": "SIGTERM", "step": 100})
    assert "jaxtrain resume 20260102T030405Z" in Page.of(report_of(stopped)).text


def test_best_so_far_follows_the_mode_of_the_metric(tmp_path: Path) -> None:
    rows = [
        {"step": s, "epoch": s / 20, "eval/accuracy": v} for s, v in ((20, 0.5), (40, math.nan), (60, 0.9), (80, 0.7))
    ]
    resolved = RESOLVED.format(name="d").replace("metric: loss", "metric: accuracy")
    page = Page.of(
        report_of(make_run(tmp_path, result=None, rows=rows, status={"state": "running"}, resolved=resolved))
    )
    assert "best eval/accuracy so far 0.9000 at step 60" in page.h1


def test_regression_and_binary_runs(tmp_path: Path) -> None:
    result = {
        **without("details", "wrong", "class_names"),
        "test": {"mae": 0.1, "rmse": 0.25, "r2": 0.9, "loss": 0.0625},
    }
    text = report_of(make_run(tmp_path / "r", result={**result, "details": {}, "wrong": [], "class_names": None}))
    page = Page.of(text)
    assert page.h1.startswith("test rmse 0.2500 on 37 rows")
    assert "Confusion" not in page.text
    binary = {"precision": [0.9], "recall": [0.8], "f1": [0.847], "support": [20], "auroc": [0.95]}
    result = {**RESULT, "class_names": None, "details": {"confusion": [[30, 2], [4, 16]], "per_class": binary}}
    page = Page.of(report_of(make_run(tmp_path / "b", result=result)))
    assert "1 (positive) 0.9000 0.8000 0.8470 20 0.9500" in page.text
    assert "1 → 0: 4 of 20" in page.text


def test_nan_values_are_counted_in_words_and_drawn_as_gaps(tmp_path: Path) -> None:
    rows = metric_rows(train_loss={30: math.nan, 40: math.inf}, eval_loss={40: math.nan}, train_skipped={30: 2.0})
    text = report_of(make_run(tmp_path / "a", rows=rows))
    assert "drawn as gaps: 2 of 11 values of train/loss, 1 of 5 values of eval/loss." in Page.of(text).text
    assert "2 updates were skipped" in text
    path = re.search(r'class="curve train" d="([^"]*)"', text)
    assert path
    assert path.group(1).count("M") == 2
    clean = report_of(make_run(tmp_path / "b"))
    assert "drawn as gaps" not in clean
    assert "were skipped" not in clean


def test_nan_in_the_result_is_the_word_nan(tmp_path: Path) -> None:
    page = Page.of(report_of(make_run(tmp_path, result=changed("test.accuracy", math.nan))))
    assert page.h1.startswith("test accuracy NaN on 37 rows")


@pytest.mark.parametrize(
    "rows", [[], [{"step": 1, "epoch": 0.05, "train/loss": 2.5}], [{"step": 1, "train/loss": math.nan}]]
)
def test_no_row_and_one_row(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    text = report_of(make_run(tmp_path, rows=rows, result=None, status={"state": "running"}))
    assert ("<svg" in text) == (rows != [] and math.isfinite(rows[0]["train/loss"]))
    assert ("No finite value was recorded yet" in text) == ("<svg" not in text)


def test_a_hundred_thousand_rows_make_a_small_page(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).uniform(0.5, 1.5, 100_000).tolist()
    rows = [{"step": i + 1, "epoch": i / 100, "train/loss": v, "train/lr": 1e-3} for i, v in enumerate(noise)]
    folder = make_run(tmp_path, rows=rows)
    began = time.perf_counter()
    text = report_of(folder)
    assert time.perf_counter() - began < 10
    assert len(text) < 120_000


def test_a_half_line_of_a_killed_process_is_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with folder.metrics.open("a") as file:
        file.write('{"step": 110, "train/lo')
    assert "at step 60" in Page.of(report_of(folder)).h1


def test_resumes_are_in_the_journal_and_on_the_curves(tmp_path: Path) -> None:
    journal = [
        {"event": "resume", "time": "2026-01-02T03:04", "step": 50, "changes": {"train.duration": ["20ep", "40ep"]}}
    ]
    text = report_of(make_run(tmp_path / "a", journal=journal))
    assert "train.duration: 20ep → 40ep" in text
    assert text.count('class="event" d=') >= 5
    plain = report_of(make_run(tmp_path / "b"))
    assert "Nothing: no resume" in plain
    assert 'class="event" d=' not in plain


def test_a_result_from_before_a_resume_is_told_apart(tmp_path: Path) -> None:
    old = report_of(make_run(tmp_path / "a", rows=metric_rows()))  # the resume removed the test row
    assert "The run was continued after this result" in old
    assert "The run was continued after this result" not in report_of(make_run(tmp_path / "b"))


@pytest.mark.parametrize("classes", [2, 26, 100, 300])
def test_many_classes_stay_readable_and_small(tmp_path: Path, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 3, (classes, classes)) + np.eye(classes, dtype=int) * 50
    per_class = {"f1": [0.5] * classes, "support": [3] * classes}
    result = {**RESULT, "class_names": None, "details": {"confusion": counts.tolist(), "per_class": per_class}}
    text = report_of(make_run(tmp_path, result=result))
    assert ('class="matrix"' in text) == (classes <= 100)
    assert ("too many for a picture" in text) == (classes > 100)
    assert ("the other" in text) == (classes > 25)
    assert len(text) < 700_000


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    assert report_of(folder) == report_of(folder)


# ------------------------------------------------------------ words


def test_numbers_for_people() -> None:
    assert [figure(v) for v in (0.99441, 1.0, 0.99997, 0.0, 0.00123, 12, 123456.7, math.nan, -math.inf, None)] == [
        "0.9944", "1.0000", "0.99997", "0.0000", "0.00123", "12", "123,457", "NaN", "-Infinity", "–",
    ]  # fmt: skip
    assert [seconds(v) for v in (0.5, 59.94, 200.0, 7500.0)] == ["0.5 s", "59.9 s", "3 min 20 s", "2 h 05 min"]


def test_wilson_interval_of_the_book() -> None:
    # Newcombe (1998), table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert np.trace(CONFUSION) == 33


def test_where_the_time_went_is_told_the_largest_share_first(tmp_path: Path) -> None:
    text = report_of(make_run(tmp_path))
    part = text.partition("Where the time went")[2].partition("</section>")[0]
    rows = re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td><td[^>]*>([^<]*)</td>', part)
    assert rows == [
        ("train", "2 min 30 s", "60.0%"),
        ("pause", "50.0 s", "20.0%"),
        ("lost", "37.5 s", "15.0%"),
        ("compile", "12.5 s", "5.0%"),
    ]
    assert "4 min 10 s of wall time; goodput 60.0%" in part
    without = {name: value for name, value in STATUS.items() if name != "time"}
    assert "Where the time went" not in report_of(make_run(tmp_path / "old", status=without))
