"""SamplingParams: the sampling and stop conditions of an answer, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mlxserve.core.errors import InvalidParameter

# A bias of -MAX_BIAS keeps a token from ever being chosen.
MAX_BIAS = 1e4
# The least and the greatest value of the parameters that may be fractions.
# Of numbers: the least and the greatest value.
RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


class StructureKind(StrEnum):
    """The language of a structure's source."""

    JSON_OBJECT = "json_object"  # any object; the source is empty
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # one of several texts
    GRAMMAR = "grammar"  # Lark's, in llguidance's dialect


@dataclass(frozen=True, slots=True)
class Structure:
    """A constraint that the whole text of an answer matches.

    Structure(StructureKind.REGEX, r"yes|no")
    Structure(StructureKind.JSON_SCHEMA, json.dumps({"type": "object"}))

    kind: the language of `source`
    source: a JSON schema as JSON, a regular expression, a JSON list of texts, or a grammar
    field: the name of the parameter in errors
    """

    kind: StructureKind
    source: str = ""
    field: str = "structure"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    r"""The sampling and stop conditions of a request, validated on construction.

    SamplingParams(temperature=0, max_tokens=64)  # greedy
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, stop=["\n\n"])

    n: number of answers to one prompt, which is computed once for all of them; 1 to 128
    max_tokens: maximum number of new tokens; None: until the model stops or the context is full
    min_tokens: number of new tokens before which neither a token that ends the answer is chosen nor a
        stop string matched; a complete structure ends it all the same
    temperature: divisor of the logits, 0 to 100; 0 is greedy
    top_p: nucleus sampling (Holtzman et al., 2020): the probability mass to sample from; 1 is off
    top_k: number of most probable tokens to sample from; 0 is off
    min_p: minimum probability relative to the most probable token's, 0 to 1; 0 is off
    seed: the same seed gives the same tokens in any batch, as far as the logits are the same: in half
        precision on Metal a batch of another size rounds them differently; None draws one
    stop: strings that end the answer and are not part of it
    stop_token_ids: tokens that end it
    ignore_eos: keep going past the model's own end (benchmarks)
    stop_on_repetition: end an answer that repeats the same tokens over and over
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or answer
        (CTRL, Keskar et al., 2019); 1 is off
    presence_penalty, frequency_penalty: subtracted from the logits of the answer's tokens, once or per
        occurrence; 0 is off
    logit_bias: added to the logits of these token ids
    logprobs: number of alternatives to report beside each chosen token's log-probability, 0 to 20;
        None reports nothing
    structure: the constraint on the text of the answer, after any thinking

    Raises InvalidParameter for a value out of range, and for values that exclude each other.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop_on_repetition: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    structure: Structure | None = None

    MAX_LOGPROBS = 20
    MAX_STOP_STRINGS = 16
    MAX_CHOICES = 128

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_whole(self.n, "n", 1, self.MAX_CHOICES)
        self._check_length()
        self._check_numbers()
        self._check_ends()
        self._check_biases()
        if self.logprobs is not None:
            check_whole(self.logprobs, "logprobs", 0, self.MAX_LOGPROBS)
        self._check_structure()

    def _check_length(self) -> None:
        if self.max_tokens is not None:
            check_whole(self.max_tokens, "max_tokens", 1, None)
        check_whole(self.min_tokens, "min_tokens", 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )

    def _check_numbers(self) -> None:
        _check_ranges((name, getattr(self, name), *bounds) for name, bounds in RANGES.items())
        if self.top_p == 0:
            raise InvalidParameter(
                "top_p", "must be above 0; use temperature=0 for greedy decoding"
            )
        check_whole(self.top_k, "top_k", 0, None)
        if self.seed is not None:
            check_whole(self.seed, "seed", -(2**63), 2**64 - 1)

    def _check_ends(self) -> None:
        _strings(self.stop, "stop", self.MAX_STOP_STRINGS)
        _whole_all(self.stop_token_ids, "stop_token_ids")
        for name in ("ignore_eos", "stop_on_repetition"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidParameter(name, f"must be True or False, got {value!r}")

    def _check_biases(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter(
                "logit_bias", f"must be numbers by token id, got {self.logit_bias!r}"
            )
        _whole_all(self.logit_bias, "logit_bias")
        biases = self.logit_bias.values()
        _check_ranges(("logit_bias", bias, -MAX_BIAS, MAX_BIAS) for bias in biases)

    def _check_structure(self) -> None:
        if not isinstance(self.structure, Structure | None):
            raise InvalidParameter("structure", f"must be a Structure, got {self.structure!r:.80}")
        if self.structure is not None and self.ignore_eos:
            raise InvalidParameter(
                "ignore_eos", "cannot be combined with structure: a structured answer has an end"
            )

    @property
    def is_penalised(self) -> bool:
        """True if a token's probability depends on the tokens chosen before it."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    def choices(self) -> list[SamplingParams]:
        """Return the parameters of each of the n answers, with seeds derived from `seed`."""
        if self.seed is None:
            return [self if self.n == 1 else replace(self, n=1)] * self.n
        seeds = (self.seed + number for number in range(self.n))
        return [replace(self, n=1, seed=s if s < 2**64 else s - 2**64) for s in seeds]


def check_whole(value: object, name: str, low: int | None = None, high: int | None = None) -> None:
    """Raises InvalidParameter for anything but an integer within the bounds."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(name, f"must be a whole number, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidParameter(name, f"must be {_range(low, high)}, got {value}")


def _whole_all(values: object, name: str) -> None:
    if not isinstance(values, (Sequence, Mapping)) or isinstance(values, (str, bytes)):
        raise InvalidParameter(name, f"must be a collection of token ids, got {values!r}")
    for value in values:
        check_whole(value, name, 0, 2**31 - 1)


def _check_ranges(numbers: Iterable[tuple[str, object, float, float]]) -> None:
    """Check numbers, each as (name, value, lowest, highest)."""
    for name, value, low, high in numbers:
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
        ):
            raise InvalidParameter(name, f"must be a finite number, got {value!r}")
        if not low <= value <= high:
            raise InvalidParameter(name, f"must be {_range(low, high)}, got {value}")


def _strings(values: object, name: str, at_most: int) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(v, str) and v for v in values):
        raise InvalidParameter(name, "must be non-empty strings")
    if len(values) > at_most:
        raise InvalidParameter(name, f"at most {at_most} are allowed, got {len(values)}")


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"between {low} and {high}"
