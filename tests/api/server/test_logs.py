from __future__ import annotations

import logging

import pytest

from mlxserve.api.server import logs

pytestmark = pytest.mark.usefixtures("logging_restored")


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_record_is_always_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logging.getLogger("mlxserve.x").warning("a\nb\r\x1b[2J\u2028\u202e%s", "\x9b\x00")
    [line] = said(capsys)
    assert line.endswith("WARNING mlxserve.x: a\\nb\\r\\x1b[2J\\u2028\\u202e\\x9b\\x00")


def test_a_traceback_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    try:
        raise ZeroDivisionError("why")
    except ZeroDivisionError:
        logging.getLogger("mlxserve.x").exception("failed")
    lines = said(capsys)
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "ZeroDivisionError: why"


def test_a_traceback_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    try:
        raise ZeroDivisionError("\x1b[2J\u202e")
    except ZeroDivisionError:
        logging.getLogger("mlxserve.x").exception("failed")
    assert said(capsys)[-1] == "ZeroDivisionError: \\x1b[2J\\u202e"


def test_records_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning")
    logging.getLogger("mlxserve.x").info("quiet")
    logging.getLogger("mlxserve.x").warning("loud")
    assert len(said(capsys)) == 1


def access(path: str) -> None:
    message = '%s - "%s %s HTTP/%s" %d'
    logging.getLogger("uvicorn.access").info(message, "127.0.0.1:5", "GET", path, "1.1", 200)


def test_polls_are_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        access(path)
    [line] = said(capsys)
    assert "/v1/models" in line


def test_polls_are_logged_at_level_debug(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug")
    access("/health")
    assert len(said(capsys)) == 1
