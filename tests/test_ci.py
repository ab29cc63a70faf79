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
JOBS: dict[str, Any] = WORKFLOW["jobs"]
MARKERS = {line.split(":")[0] for line in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
GROUPS = PROJECT["dependency-groups"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
STEPS = [(job, step) for job, fields in JOBS.items() for step in fields["steps"]]


def test_a_job_that_hangs_ends_long_before_the_default_of_six_hours() -> None:
    for name, job in JOBS.items():
        assert 0 < job["timeout-minutes"] <= 90, name


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
    if words[:3] == ["uv", "tool", "install"]:
        return
    if words[0] == "mlxserve":
        words = ["uv", "run", *words]
    assert words[:2] == ["uv", "run"], line
    words = words[2:]
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
        assert len(words) == 1 or (words[1] == "-m" and words[2] in MARKERS), line
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
        "uv run pytest -p tests.emulated_gpu -m gpu",
        "uv run --extra training pytest",
        "uv run --group real-models pytest",
        "bash .ci/walk",
        "uv run --group docs mkdocs build --strict -f .github/none.yml",
        "make",
    ]:
        with pytest.raises(AssertionError):
            check(line)


@pytest.mark.parametrize("system", ["ubuntu", "macos"])
def test_a_report_and_a_short_bench_of_each_system_are_kept(system: str) -> None:
    jobs = [job for job in JOBS.values() if job["runs-on"].startswith(system)]
    kept = [
        (job, step["with"]["path"].split())
        for job in jobs
        for step in job["steps"]
        if step.get("uses", "").startswith("actions/upload-artifact")
    ]
    [(job, files)] = kept
    lines = [step.get("run", "") for step in job["steps"]]
    [doctor] = [line for line in lines if "mlxserve doctor" in line]
    [bench] = [line for line in lines if "mlxserve bench" in line]
    assert files == [shlex.split(doctor)[-1], shlex.split(bench)[-1]]
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
