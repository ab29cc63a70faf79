"""`python -m tests.training`: print generated data, train the model, evaluate it."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from mlxserve.hub.embedded import MODEL_NAME, model_path
from tests.training.abilities import ABILITIES
from tests.training.curriculum import CONTINUED_PLAN
from tests.training.words import DataSplit

if TYPE_CHECKING:
    from tests.training.evaluate import AbilityResult
    from tests.training.network import NetworkShape
    from tests.training.train import Recipe

VOCAB_SIZE = 2048
MAX_POSITIONS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    options = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m tests.training",
        description=f"The embedded model {MODEL_NAME}: its data, training and evaluation.",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("generate", help="print generated conversations")
    command.set_defaults(run=_generate)
    command.add_argument(
        "--num", type=int, default=1, help="conversations per ability (default %(default)s)"
    )
    command.add_argument("--held-out", action="store_true", help="use the held-out split")
    command.add_argument("--ability", choices=[a.name for a in ABILITIES], help="this one only")
    _add_seed(command)

    command = commands.add_parser("tokenizer", help="train the tokenizer on generated text")
    command.set_defaults(run=_tokenizer)
    command.add_argument("--num", type=int, default=8000, help="training conversations")
    command.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    _add_folder(command)
    _add_seed(command)

    command = commands.add_parser("train", help="train the network (needs the `train` extra)")
    command.set_defaults(run=_train)
    command.add_argument(
        "--run-folder",
        type=Path,
        default=Path("mini-run"),
        help="folder of the checkpoint and the log",
    )
    command.add_argument("--steps", type=int, help="total optimiser steps")
    command.add_argument(
        "--initial", type=Path, help="model folder to continue from (skips the foundation stage)"
    )
    command.add_argument(
        "--stage",
        choices=[stage.name for stage in CONTINUED_PLAN],
        help="with --initial: only this stage",
    )
    command.add_argument(
        "--rate", type=float, default=1.0, help="factor of the learning rates (default 1.0)"
    )
    command.add_argument(
        "--threads", type=int, default=0, help="PyTorch threads (0: PyTorch chooses)"
    )
    command.add_argument("--smoke", action="store_true", help="a tiny run of the whole pipeline")
    command.add_argument("--plot", type=Path, help="plot the losses to this PNG file at the end")
    command.add_argument("--no-export", action="store_true", help="do not write the model folder")
    _add_folder(command)
    _add_seed(command, default=1)

    command = commands.add_parser(
        "evaluate", help="evaluate a model on held-out prompts; exits with 1 if a bar was missed"
    )
    command.set_defaults(run=_evaluate)
    command.add_argument(
        "--prompts", type=int, default=200, help="prompts per ability (default 200)"
    )
    command.add_argument("--ability", choices=[a.name for a in ABILITIES], help="this one only")
    command.add_argument("--misses", type=int, default=0, help="wrong answers to show per ability")
    _add_folder(command)
    _add_seed(command)
    return top


def _add_seed(command: argparse.ArgumentParser, default: int = 0) -> None:
    command.add_argument("--seed", type=int, default=default, help="default %(default)s")


def _add_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", type=Path, default=model_path(), help="model folder (default: the packaged one)"
    )


def _generate(options: argparse.Namespace) -> int:
    rng = Random(options.seed)
    split = DataSplit.HELD_OUT if options.held_out else DataSplit.TRAIN
    for ability in ABILITIES:
        if options.ability in (None, ability.name):
            for _ in range(options.num):
                print(f"=== {ability.name}")
                for message in ability.make(rng, split, ability.num_words).messages:
                    calls = message.get("tool_calls", "")
                    print(f"[{message['role']}] {message['content']}{calls}")
    return 0


def _tokenizer(options: argparse.Namespace) -> int:
    import json

    from tests.training import words
    from tests.training.conversation import Dialogue
    from tests.training.curriculum import FULL_PLAN, example
    from tests.training.tokenizer import save_tokenizer, train_tokenizer

    rng, texts = Random(options.seed), list[str]()
    for _ in range(options.num):
        made = example(rng, FULL_PLAN[2])
        if not isinstance(made, Dialogue):
            continue
        texts += [message["content"] for message in made.messages]
        texts += [json.dumps(tool) for tool in made.tools]
    tokenizer = train_tokenizer(texts, options.vocab_size, words.LISTED)
    save_tokenizer(tokenizer, options.model, MAX_POSITIONS)
    print(f"{tokenizer.get_vocab_size()} tokens, written to {options.model}")
    return 0


def _train(options: argparse.Namespace) -> int:
    # By default OpenMP's threads spin while they wait; the variable must be set before torch is
    # imported. With other load on two cores, six steps took 135-158 s with spinning, 19 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from tests.training.export import PARITY_TOLERANCE, export, parity
    from tests.training.train import Training, plot, train

    if options.threads:
        torch.set_num_threads(options.threads)
    if options.stage and not options.initial:
        raise SystemExit("--stage needs --initial, the model to continue from")
    recipe, shape = _recipe(options)
    training = Training(recipe, shape, options.model, options.run_folder)
    if options.initial:
        training.start_from(options.initial)
    training.resume()
    train(training)
    if options.plot:
        plot(options.run_folder, options.plot)
    if options.no_export:
        return 0
    folder = _smoke_folder(options) if options.smoke else options.model
    export(training.network, folder)
    difference = parity(training.network, folder)
    print(f"exported to {folder}; logits differ from mlx-lm's by {difference:.1e}")
    return 0 if difference < PARITY_TOLERANCE else 1


def _smoke_folder(options: argparse.Namespace) -> Path:
    """A model folder within the run folder, with the model's tokenizer."""
    folder: Path = options.run_folder / "model"
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.model / name, folder)
    return folder


def _recipe(options: argparse.Namespace) -> tuple[Recipe, NetworkShape]:
    from dataclasses import replace

    from tests.training.network import NetworkShape
    from tests.training.tokenizer import load_tokenizer
    from tests.training.train import SMOKE, Recipe

    vocab_size = load_tokenizer(options.model).get_vocab_size()
    recipe = replace(SMOKE if options.smoke else Recipe(), seed=options.seed)
    recipe = replace(
        recipe,
        is_continued=options.initial is not None,
        only_stage=options.stage,
        matrix_lr=recipe.matrix_lr * options.rate,
        vector_lr=recipe.vector_lr * options.rate,
    )
    if options.steps:
        recipe = replace(recipe, num_steps=options.steps)
    if options.smoke:
        return recipe, NetworkShape(
            vocab_size, hidden_size=64, num_layers=2, num_heads=2, mlp_size=64
        )
    return recipe, NetworkShape(vocab_size, max_positions=MAX_POSITIONS)


def _evaluate(options: argparse.Namespace) -> int:
    from tests.training.evaluate import HEADER, line

    results = []
    print(HEADER)
    for result in _results(options):
        print(line(result), flush=True)
        results.append(result)
    for result in results:
        for miss in islice(result.misses, options.misses):
            print(
                f"\n--- {result.ability.name}\nprompt:   {miss.conversation.prompt[-1]['content']}"
            )
            print(f"expected: {miss.conversation.answer}\nanswer:   {miss.given}")
    return 0 if all(result.is_passed for result in results) else 1


def _results(options: argparse.Namespace) -> Iterator[AbilityResult]:
    """Every ability, then every condition of recall; or only the chosen ability."""
    from tests.training.conditions import CONDITIONS, examine_under
    from tests.training.evaluate import Student, evaluate

    chosen = [a for a in ABILITIES if options.ability in (None, a.name)]
    with Student(options.model) as student:
        yield from evaluate(options.prompts, options.seed, student, chosen)
    if not options.ability:
        for condition in CONDITIONS:
            yield examine_under(condition, options.prompts, options.seed, options.model)


if __name__ == "__main__":
    sys.exit(main())
