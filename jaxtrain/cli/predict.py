"""jaxtrain predict: what a trained model says of new inputs."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from jaxtrain.cli.train import RunArgument
from jaxtrain.config.errors import UNEXPECTED, ConfigError, choices


def predict(
    run: RunArgument,
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT...", help="pictures, folders, .npz, .npy; for a language model: prompts"),
    ],
    step: Annotated[str, typer.Option(help="best, last or a saved step")] = "best",
    form: Annotated[str, typer.Option("--format", help="jsonl, csv, or text (language models)")] = "",
    output: Annotated[Path | None, typer.Option(help="a file to write; else the terminal")] = None,
    outputs: Annotated[bool, typer.Option("--outputs", help="the model's own numbers too, such as logits")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="rows at a time")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="prompts: how many tokens to add")] = 200,
    samples: Annotated[
        int, typer.Option(min=1, help="prompts: continuations of each, with seeds seed, seed + 1, ...")
    ] = 1,
    temperature: Annotated[float, typer.Option(help="prompts: 0 = always the likeliest token")] = 1.0,
    top_k: Annotated[int, typer.Option(help="prompts: choose among so many tokens; 0 = all")] = 0,
    top_p: Annotated[float, typer.Option(help="prompts: among the likeliest with this probability together")] = 1.0,
    seed: Annotated[int, typer.Option(help="prompts: seed of the choice")] = 0,
) -> int:
    """What a saved step of RUN says of new inputs, with the preprocessing that it was trained with."""
    from jaxtrain.evaluate import load_model

    model = load_model(run, step)
    if model.schema.task == "tokens":
        from jaxtrain.evaluate.generate import Generator, Sampling

        allowed = ("text", "jsonl", "csv")
        form = _form(form or "text", allowed)
        generator = Generator(model)
        asked = [(prompt, Sampling(temperature, top_k, top_p, seed + i)) for prompt in inputs for i in range(samples)]
        for prompt, _ in asked:
            generator.tokenizer.encode(prompt)  # a prompt that cannot be said is told before anything is written
        with _opened(output) as out:
            TEXTS[form](generator, asked, tokens, out)
        return 0
    from jaxtrain.evaluate.predict import FORMS, write
    from jaxtrain.evaluate.predict import predict as predictions

    form = _form(form or "jsonl", tuple(FORMS))
    told = predictions(model, inputs, batch_size)
    first = list(islice(told, 1))  # what cannot be read at all is told before a file is opened
    with _opened(output) as out:
        count, failed = write(chain(first, told), model, out, form, outputs=outputs)
    if failed:
        print(f"jaxtrain: {failed} of {count} inputs could not be read; each is told in its place", file=sys.stderr)
    return UNEXPECTED if failed else 0


def _form(form: str, allowed: tuple[str, ...]) -> str:
    if form not in allowed:
        raise ConfigError(f"--format: {form!r} is not allowed; {choices(form, allowed)}")
    return form


@contextlib.contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        return
    try:
        file = output.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"--output: {str(output)!r} cannot be written: {error.strerror}") from None
    with file:
        yield file


def _as_text(generator: Any, asked: Any, tokens: int, out: TextIO) -> None:
    """Prompt and continuation as they come, an empty line between several."""
    for number, (prompt, sampling) in enumerate(asked):
        out.write(("\n\n" if number else "") + prompt)
        for piece in generator.pieces(prompt, tokens, sampling):
            out.write(piece)
            out.flush()
    out.write("\n")


def _as_jsonl(generator: Any, asked: Any, tokens: int, out: TextIO) -> None:
    for prompt, sampling in asked:
        text = generator.generate(prompt, tokens, sampling)
        out.write(
            json.dumps({"prompt": prompt, "continuation": text, "seed": sampling.seed}, ensure_ascii=False) + "\n"
        )


def _as_csv(generator: Any, asked: Any, tokens: int, out: TextIO) -> None:
    import csv

    writer = csv.writer(out)
    writer.writerow(["prompt", "continuation", "seed"])
    for prompt, sampling in asked:
        writer.writerow([prompt, generator.generate(prompt, tokens, sampling), sampling.seed])


TEXTS = {"text": _as_text, "jsonl": _as_jsonl, "csv": _as_csv}
