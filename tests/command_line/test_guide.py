"""The session in the guide of the command line is true."""

import contextlib
import io
import pathlib
import re
import shlex

from jqx._src.command_line.main import main

KINDS = ("python", "console")
GUIDE = pathlib.Path(__file__).parents[2] / "docs/guides/command_line.md"


def test_the_session_prints_what_the_guide_says(tmp_path, monkeypatch):
    text = GUIDE.read_text()
    code, session = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in KINDS)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    commands = re.findall(r"\$ python -m jqx (.*)\n((?:[^$].*\n)*)", session)
    assert len(commands) == 3
    for command, printed in commands:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main(shlex.split(command))
        assert out.getvalue() == printed
