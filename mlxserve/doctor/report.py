"""`mlxserve doctor`: describes this machine, measures its speed and tests an answer.

    findings = list(diagnose())

Each finding is one line of a table that can be pasted into a bug report. The checks are
independent, so a broken one does not hide the next.
"""

from __future__ import annotations

import asyncio
import platform
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import MlxServeError
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.doctor.finding import Finding, Grade
from mlxserve.doctor.kernels import check_kernels
from mlxserve.doctor.sections import section
from mlxserve.system import machine
from mlxserve.system.blas import SlowBlasWarning

if TYPE_CHECKING:
    import mlx.core as mx

    from mlxserve.chat.writer import Writer

# A word to recall from several pages earlier. A wrong page, mask or position loses it.
EXPECTED = "lantern"
_FILLER = " ".join(f"Line {number} of the log says that all is well." for number in range(12))
QUESTION = f"The code word is {EXPECTED}. {_FILLER} What is the code word?"
# mlx's reference BLAS reaches about 2, any optimised one more than 20.
_SLOW_GFLOPS = 10.0


def diagnose(config: EngineConfig | None = None) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. `config`: the self-test's engine.

    Raises nothing: a section that fails is a finding.
    """
    engine = config or EngineConfig().with_options(max_num_seqs=4, disable_log_stats=True)
    yield from section("machine", _facts)
    yield from section("kernels", check_kernels)
    yield from section("matmul", lambda: [measure_matmul()])
    yield from section("rows of a step", lambda: [time_rows(engine)])
    yield from section("self-test", lambda: [self_test(engine)])


def _facts() -> Iterator[Finding]:
    with warnings.catch_warnings():
        # A slow BLAS is reported below as a finding.
        warnings.simplefilter("ignore", SlowBlasWarning)
        for name, value in machine.facts().items():
            yield Finding(name, value)
    if version := platform.mac_ver()[0]:
        yield Finding("macOS", version)


def measure_matmul() -> Finding:
    """Time three float32 products; the best is an upper bound for the speed of prompts."""
    import mlx.core as mx

    size = 4096 if machine.is_metal() else 1024
    a = mx.random.normal((size, size))
    # The first one also compiles.
    mx.eval(a, a @ a)
    seconds = min(_timed_matmul(a) for _ in range(3))
    gflops = 2 * size**3 / seconds / 1e9
    grade = Grade.OK if gflops >= _SLOW_GFLOPS else Grade.SLOW
    return Finding("matmul", f"{gflops:.0f} GFLOP/s in float32 at {size} x {size}", grade)


def time_rows(config: EngineConfig) -> Finding:
    """Time steps of a few rows: what drafts cost here. Each is of the self-test's model."""
    from mlxserve.doctor.model_speeds import rows
    from mlxserve.model.row_speeds import describe

    times = {int(name): milliseconds / 1e3 for name, milliseconds in rows(config.model).items()}
    return Finding("rows of a step", describe(times))


def self_test(config: EngineConfig) -> Finding:
    """Ask the model to recall a word across pages, twice, then audit the pages.

    The second answer comes from the cache.
    """
    started = time.perf_counter()
    try:
        answers = asyncio.run(_ask_twice(config))
    except MlxServeError as error:
        return Finding("self-test", f"the model does not answer: {error}", Grade.BROKEN)
    seconds = time.perf_counter() - started
    for text, num_cached in answers:
        if EXPECTED not in text:
            value = f"expected {EXPECTED!r} ({num_cached} tokens cached), got {text[:60]!r}"
            return Finding("self-test", value, Grade.BROKEN)
    if config.scheduler.enable_prefix_caching and not answers[1][1]:
        return Finding("self-test", "a repeated prompt was not found in the cache", Grade.BROKEN)
    value = f"recalled a word across pages, computed and cached, in {seconds:.1f} s with loading"
    return Finding("self-test", value, Grade.OK)


async def _ask_twice(config: EngineConfig) -> list[tuple[str, int]]:
    """Return (text, cached tokens) of a question, first computed, then from the cache."""
    from mlxserve.build import build_text_model

    model = await asyncio.to_thread(build_text_model, config)
    try:
        writer = model.require_writer()
        answers = [await _ask(writer), await _ask(writer)]
        await model.engine.check()
        return answers
    finally:
        model.close()


async def _ask(writer: Writer) -> tuple[str, int]:
    prompt = writer.render([{"role": "user", "content": QUESTION}])
    answer = await writer.submit(prompt, SamplingParams(temperature=0, max_tokens=32))
    deltas = [delta async for delta in answer]
    usage = deltas[-1].usage
    assert usage is not None
    return "".join(delta.text for delta in deltas), usage.cached_tokens


def _timed_matmul(a: mx.array) -> float:
    # Not before machine.prepare() has run.
    import mlx.core as mx

    started = time.perf_counter()
    mx.eval(a @ a)
    return time.perf_counter() - started
