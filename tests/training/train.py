"""Training: a deterministic, resumable loop on the CPU.

A run is a folder with `checkpoint.pt` and `log.csv`. The same seed and arguments give the same
weights, even if the run was interrupted and resumed.
"""

from __future__ import annotations

import csv
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tqdm import tqdm

from tests.training.batches import batched, encoded
from tests.training.curriculum import (
    CONTINUED_PLAN,
    FULL_PLAN,
    TrainingPlan,
    TrainingStage,
    examples,
    stage_at,
)
from tests.training.muon import Muon
from tests.training.network import Network, NetworkShape
from tests.training.tokenizer import ChatEncoder, load_tokenizer


@dataclass(frozen=True, slots=True)
class Recipe:
    """The hyperparameters of a run."""

    seed: int = 1
    num_steps: int = 4000
    tokens_per_step: int = 4096
    tokens_per_batch: int = 1024  # of one forward; more means more padding
    matrix_lr: float = 0.012
    vector_lr: float = 0.002  # embeddings and norms
    warmup_steps: int = 50
    decay_share: float = 0.5  # of the steps, at the end, in which the rates fall to zero
    weight_decay: float = 0.02
    clip_norm: float = 1.0
    is_continued: bool = False  # starts from weights that copy and recall
    only_stage: str | None = None  # instead of all stages

    @property
    def plan(self) -> TrainingPlan:
        plan = CONTINUED_PLAN if self.is_continued else FULL_PLAN
        if self.only_stage is None:
            return plan
        return tuple(replace(stage, share=1.0) for stage in plan if stage.name == self.only_stage)

    def rate(self, step: int) -> float:
        """The factor of the learning rates at `step`: warm-up, plateau, linear decay."""
        decay_steps = max(1, int(self.num_steps * self.decay_share))
        return min(1.0, (step + 1) / self.warmup_steps, (self.num_steps - step) / decay_steps)


SMOKE = Recipe(num_steps=24, tokens_per_step=512, tokens_per_batch=512, warmup_steps=2)
LOG_FIELDS = ("step", "stage", "loss", "tokens", "seconds")


class Training:
    """A network in training, with its optimisers, the steps and tokens done, and its folder."""

    def __init__(self, recipe: Recipe, shape: NetworkShape, tokenizer: Path, folder: Path) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.folder = folder
        self.encoder = ChatEncoder(load_tokenizer(tokenizer))
        self.network = Network(shape)
        matrices = [p for p in self.network.model.layers.parameters() if p.ndim == 2]
        chosen = set(map(id, matrices))
        vectors = [p for p in self.network.parameters() if id(p) not in chosen]
        self.optimisers = (
            Muon(matrices, recipe.matrix_lr, weight_decay=recipe.weight_decay),
            torch.optim.AdamW(vectors, recipe.vector_lr, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self.step = 0
        self.num_tokens = 0

    @property
    def stage(self) -> TrainingStage:
        return stage_at(self.recipe.plan, self.step / self.recipe.num_steps)

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    def save(self) -> None:
        """Write the checkpoint atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        state = {
            "recipe": asdict(self.recipe),
            "shape": asdict(self.network.shape),
            "step": self.step,
            "num_tokens": self.num_tokens,
            "network": self.network.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        torch.save(state, partial)
        partial.replace(self.checkpoint)

    def resume(self) -> None:
        """Load the checkpoint in the folder, if there is one."""
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(state["network"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.num_tokens = state["step"], state["num_tokens"]

    def start_from(self, folder: Path) -> None:
        """Start from the exported weights in `folder`."""
        weights = load_file(folder / "model.safetensors")
        self.network.load_state_dict({name: value.float() for name, value in weights.items()})

    def run_step(self) -> float:
        """One update. Returns the mean loss per counted token, in nats."""
        recipe, stage = self.recipe, self.stage
        stream = examples(recipe.seed, self.step, stage)
        rows = encoded(stream, self.encoder, recipe.tokens_per_step, stage.max_tokens)
        batches = batched(rows, recipe.tokens_per_batch)
        num_taught = sum(batch.num_taught for batch in batches)
        total = 0.0
        for batch in batches:
            share = batch.num_taught / num_taught
            loss = self.network.loss(batch.tokens, batch.taught) * share
            loss.backward()
            total += loss.item()
        self._update()
        self.step += 1
        self.num_tokens += sum(batch.num_tokens for batch in batches)
        return total

    def _update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_norm)
        rate = self.recipe.rate(self.step)
        peaks = (self.recipe.matrix_lr, self.recipe.vector_lr)
        for optimiser, peak in zip(self.optimisers, peaks, strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
            optimiser.step()
            optimiser.zero_grad()


def train(training: Training, checkpoint_every: int = 50) -> None:
    """Run to the last step with a progress bar, a log, and a checkpoint every few steps."""
    num_steps = training.recipe.num_steps
    training.folder.mkdir(parents=True, exist_ok=True)
    log_path = training.folder / "log.csv"
    began = time.monotonic() - _begin_log(log_path, training.step)
    with (
        log_path.open("a", newline="") as file,
        tqdm(total=num_steps, initial=training.step, unit="step") as bar,
    ):
        log = csv.writer(file)
        while training.step < num_steps:
            stage = training.stage.name
            loss = training.run_step()
            seconds = round(time.monotonic() - began, 1)
            log.writerow((training.step, stage, f"{loss:.4f}", training.num_tokens, seconds))
            file.flush()
            bar.set_postfix(loss=f"{loss:.3f}", stage=stage)
            bar.update()
            if training.step % checkpoint_every == 0 or training.step == num_steps:
                training.save()


def _begin_log(path: Path, step: int) -> float:
    """Keep the log's rows up to `step`; returns the seconds they took."""
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if int(row["step"]) <= step]
    with path.open("w", newline="") as file:
        log = csv.DictWriter(file, LOG_FIELDS)
        log.writeheader()
        log.writerows(rows)
    return float(rows[-1]["seconds"]) if rows else 0.0


def plot(folder: Path, image: Path) -> None:
    """Plot the losses of the run in `folder`, smoothed over 20 steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    with (folder / "log.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    window = 20
    means = [
        sum(part := losses[max(0, i - window) : i + 1]) / len(part) for i in range(len(losses))
    ]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(losses, alpha=0.25)
    axes.plot(means)
    axes.set(xlabel="step", ylabel="loss (nats per taught token)", yscale="log")
    figure.savefig(image, dpi=120, bbox_inches="tight")
