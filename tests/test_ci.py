"""The workflow of continuous integration is well-formed, and its commands exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from mlxserve.cli.agents import AGENTS
from tests.clients.test_ai_sdk import PACKAGES as AI_SDK_PACKAGES
from tests.test_docs import commands, flags_of

ROOT = Path(__file__).parent.parent
WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
CONSTRAINTS = ROOT / ".github/constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NIGHTLY: dict[Any, Any] = yaml.safe_load(
    (ROOT / ".github/workflows/nightly.yml").read_text("utf-8")
)
JOBS: dict[str, Any] = WORKFLOW["jobs"]
ALL_JOBS: dict[str, Any] = {**JOBS, **NIGHTLY["jobs"]}
MARKERS = {line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
GROUPS = PROJECT["dependency-groups"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
STEPS = [(job, step) for job, fields in ALL_JOBS.items() for step in fields["steps"]]


def test_a_job_that_hangs_ends_long_before_the_default_of_six_hours() -> None:
    for name, job in ALL_JOBS.items():
        assert 0 < job["timeout-minutes"] <= 90, name


@pytest.mark.parametrize("name", ["metal", "macos", "newest"])
def test_a_step_on_a_mac_that_hangs_ends_before_its_job(name: str) -> None:
    """What comes after it is still run, and its files are kept."""
    job = ALL_JOBS[name]
    limits = [step["timeout-minutes"] for step in job["steps"] if "run" in step]
    assert max(limits) < job["timeout-minutes"]
    assert sum(limits) <= job["timeout-minutes"]
    *_, last = job["steps"]
    assert (last["if"], last["uses"][:23]) == ("always()", "actions/upload-artifact")


def test_the_metal_job_names_its_device_before_anything_that_could_fail() -> None:
    assert next(iter(JOBS)) == "metal"
    assert JOBS["metal"]["steps"][0]["run"].startswith("system_profiler ")


def test_the_metal_job_has_one_worker() -> None:
    """A hosted Mac has three cores and 5 GB for its GPU."""
    [run] = [step["run"] for step in JOBS["metal"]["steps"] if "pytest" in step.get("run", "")]
    assert " -n 1" in run


def test_every_night_the_newest_mlx_is_tested_and_nothing_is_written() -> None:
    assert NIGHTLY[True]["schedule"]  # `on` is a boolean of YAML 1.1
    assert NIGHTLY["permissions"] == {"contents": "read"}
    [job] = NIGHTLY["jobs"].values()
    assert job["strategy"]["matrix"]["system"] == ["ubuntu-latest", "macos-15"]
    lines = [step["run"] for step in job["steps"] if "run" in step]
    newest = next(i for i, line in enumerate(lines) if line.startswith("uv pip install --upgrade"))
    assert {*NEWEST} <= set(lines[newest].split())
    # `uv run` alone would install the versions of pyproject.toml again.
    assert all("--no-sync" in line for line in lines[newest + 1 :])


NEWEST = ("mlx", "mlx-lm", "mlx-vlm")


def test_a_step_is_an_action_of_a_version_or_commands_that_exist() -> None:
    for job, step in STEPS:
        assert ("uses" in step) != ("run" in step), job
        if "uses" in step:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), (job, step["uses"])
        for line in step.get("run", "").splitlines():
            check(line)


def check(line: str) -> None:
    """Raises AssertionError for a command that does not exist here."""
    words = shlex.split(line)
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file(), line
        return
    if words[:3] == ["python3", "-m", "pip"] and words[3] in ("install", "download"):
        return
    if words[:3] == ["npm", "install", "--global"]:
        hints = [agent.install_hint.split()[-1] for agent in AGENTS.values()]
        others = ["cline", "@qwen-code/qwen-code"]
        packages = ["ollama", *AI_SDK_PACKAGES]
        assert words[3:] in (hints, others, packages, ["axe-core@4"]), line
        return
    if words[:2] == ["sudo", "apt-get"]:
        assert words[2:] in (["update"], ["install", "--yes", "redis-server"]), line
        return
    if words[:3] == ["uv", "tool", "install"] or words == ["uv", "sync"]:
        return
    if words[:4] == ["uv", "pip", "install", "--upgrade"]:
        assert tuple(words[4:]) == NEWEST, line
        return
    if words[0] == "system_profiler":
        assert all(word.startswith("SP") for word in words[1:]), line
        return
    if words[0] == "mlxserve":
        words = ["uv", "run", *words]
    assert words[:2] == ["uv", "run"], line
    words = words[2:]
    if words[0] == "--no-sync":
        words = words[1:]
    if words[0] in ("--extra", "--group"):
        assert words[1] in (EXTRAS if words[0] == "--extra" else GROUPS), line
        words = words[2:]
    if words[0] == "mkdocs":
        assert words[1:4] == ["build", "--strict", "-f"], line
        assert (ROOT / words[4]).is_file(), line
        return
    if words[0] == "pytest":
        if words[1:2] == ["-p"]:
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file(), line
            words = [words[0], *words[3:]]
        if words[-1].startswith("--junitxml="):
            words = words[:-1]
        if words[-2:] == ["-n", "1"]:
            words = words[:-2]
        assert len(words) == 1 or (words[1] == "-m" and words[2:] in [[each] for each in MARKERS])
        return
    typed = shlex.join(words)
    command = max((c for c in commands() if f"{typed} ".startswith(f"{c} ")), key=len)
    assert command not in ("mlxserve", "mlxserve bench", "python -m tests.reliability"), line
    assert set(flags_of(words[len(command.split()) :])) <= commands()[command], line


def test_a_command_that_does_not_exist_is_found() -> None:
    for line in [
        "uv run mlxserve diagnose",
        "uv run mlxserve doctor --file x.json",
        "uv run mlxserve bench everything",
        "uv run python -m tests.reliability engine --minutes 5",
        "uv run python -m tests.reliability everything",
        "uv run pytest -m gpu",
        "uv run pytest -p tests.no_gpu -m metal",
        "uv run pytest -m metal -n 4",
        "uv pip install --upgrade mlx",
        "uv run pytest -p tests.emulated_gpu -m gpu",
        "uv run --extra training pytest",
        "uv run --group real-models pytest",
        "bash .ci/walk",
        "uv run --group docs mkdocs build --strict -f .github/none.yml",
        "make",
    ]:
        with pytest.raises(AssertionError):
            check(line)


# Options and commands whose last word is a file or a folder.
_WRITES = re.compile(r"--report |--json |--junitxml=|screenshots ")


@pytest.mark.parametrize("system", ["ubuntu", "macos"])
def test_a_report_and_a_short_bench_of_each_system_are_kept(system: str) -> None:
    jobs = [job for job in JOBS.values() if job["runs-on"].startswith(system)]
    kept = [
        (job, step["with"]["path"].split())
        for job in jobs
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact")
    ]
    for job, files in kept:
        lines = [step.get("run", "") for step in job["steps"]]
        written = [
            shlex.split(line)[-1].rpartition("=")[2] for line in lines if _WRITES.search(line)
        ]
        assert sorted(files) == sorted(written)
    assert {"doctor.json", "bench.json"} <= {file for _, files in kept for file in files}
    names = [
        step["with"]["name"] for j in jobs for step in j["steps"] if "name" in step.get("with", {})
    ]
    assert len(names) == len(set(names))


# A marker that is run in part, as by `.ci/run`, counts as well.
_PYTEST = r"uv run (?:--extra train |--group gemma )?pytest(?: -p tests\.\w+)?(?: -m \"?(\w+))?"


def suites_by_place() -> dict[str, set[str]]:
    """The markers that `.ci/run` and each job select; "" is the plain run."""
    texts = {name: [step.get("run", "") for step in job["steps"]] for name, job in JOBS.items()}
    texts[".ci/run"] = [(ROOT / ".ci/run").read_text("utf-8")]
    return {name: set(re.findall(_PYTEST, "\n".join(lines))) for name, lines in texts.items()}


def test_every_suite_runs_somewhere() -> None:
    assert set().union(*suites_by_place().values()) == {"", *MARKERS}


def test_the_documentation_says_where_each_suite_runs() -> None:
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    row = rf"^\| .* \| `{_PYTEST}` \| (?:job )?`([^`]+)` \|"
    documented = re.findall(row, text, re.MULTILINE)
    assert {suite for suite, _ in documented} == {"", *MARKERS}
    runs = suites_by_place()
    assert [(suite, place) for suite, place in documented if suite not in runs[place]] == []


def pinned() -> dict[str, list[Version]]:
    """The versions of each package that a release was tested with; several where Pythons differ."""
    found: dict[str, list[Version]] = {}
    for line in CONSTRAINTS.read_text("utf-8").splitlines():
        requirement = Requirement(line)
        [specifier] = requirement.specifier
        assert specifier.operator == "==", line
        found.setdefault(canonicalize_name(requirement.name), []).append(Version(specifier.version))
    return found


def test_a_release_has_one_tested_version_of_everything_that_it_needs() -> None:
    versions = pinned()
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        assert versions[canonicalize_name(requirement.name)], f"{text} is not pinned"
        for version in versions[canonicalize_name(requirement.name)]:
            assert version in requirement.specifier, text
    assert {"mlx-metal", "mlx-cpu"} <= versions.keys(), "of both systems"
    assert all(len(each) <= 2 for each in versions.values())


def test_the_report_that_the_readme_asks_for_has_an_issue_form() -> None:
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/mac-report.yml").read_text("utf-8"))
    assert f'"{form["name"]}"' in (ROOT / "README.md").read_text("utf-8")
    fields = {part["id"]: part for part in form["body"] if "id" in part}
    assert fields["report"]["validations"]["required"]
    text = "\n".join(part["attributes"].get("value", "") for part in form["body"])
    [command] = re.findall(r"^\$ (mlxserve .*)$", text, re.MULTILINE)
    check(f"uv run {command}")
    assert {part["type"] for part in form["body"]} <= {"markdown", "input", "textarea"}


@pytest.mark.parametrize("system", ["ubuntu", "macos"])
def test_the_suite_runs_on_each_system(system: str) -> None:
    jobs = [job for job in JOBS.values() if job["runs-on"].startswith(system)]
    assert any(step.get("run") == "bash .ci/run" for job in jobs for step in job["steps"])
